from typing import Any, Final, SupportsFloat, SupportsIndex

torch_version: str | None
DEFAULT_GAMMA: float
MASK_FORMS: str
MAX_MAGNITUDE: float
MAX_SEQUENCE_TOKENS: int

class ArgumentError(ValueError): ...
class StateError(RuntimeError): ...

class WorkloadModel:
    gamma: Final[float]
    def __init__(self, gamma: SupportsFloat = ...) -> None: ...
    def work(self, seq_len: SupportsIndex, d_model: SupportsIndex, mask: str = ...) -> float: ...
    def replace(self, **fields: float) -> WorkloadModel: ...
    def to_dict(self) -> dict[str, Any]: ...

class Topology:
    num_ranks: Final[int]
    bags: Final[list[range]]
    def __init__(self, text: str, num_ranks: SupportsIndex | None = ...) -> None: ...

class Sample:
    text_tokens: Final[int]
    visual_tokens: Final[int]
    num_tokens: Final[int]
    def __init__(self, text_tokens: SupportsIndex, visual_tokens: SupportsIndex) -> None: ...

class DataMix:
    num_ranks: Final[int]
    @staticmethod
    def parse(text: str, resolution_scale: SupportsFloat = ..., max_text_tokens: SupportsIndex = ...) -> DataMix: ...
    @staticmethod
    def names() -> list[str]: ...
    def check_divides(self, num_ranks: SupportsIndex) -> None: ...
    def draw(self, seed: SupportsIndex, step: SupportsIndex, rank: SupportsIndex) -> list[Sample]: ...
    def draw_lengths(self, seed: SupportsIndex, step: SupportsIndex, num_ranks: SupportsIndex) -> list[list[int]]: ...

class Cluster:
    flops_per_s: Final[float]
    ranks_per_node: Final[int]
    node_bytes_per_s: Final[float]
    network_bytes_per_s: Final[float]
    node_latency_s: Final[float]
    network_latency_s: Final[float]
    fixed_s: Final[float]
    host_s_per_piece: Final[float]
    overlaps_attention: Final[bool]
    def __init__(self, name: str = ..., **fields: float) -> None: ...
    @staticmethod
    def published(**fields: float) -> Cluster: ...
    @staticmethod
    def names() -> list[str]: ...
    def replace(self, **fields: float) -> Cluster: ...
    def to_dict(self) -> dict[str, Any]: ...

class TrainedModel:
    num_blocks: Final[int]
    num_parameters: Final[float]
    element_size: Final[int]
    mode: Final[str]
    recomputes: Final[bool]
    routed: Final[bool]
    shard_ranks: Final[int]
    side_bytes_per_token: Final[int]
    num_heads: Final[int]
    num_kv_heads: Final[int]
    cuts_queries: Final[bool]
    max_stage_bytes: Final[float]
    token_passes: Final[float]
    attention_passes: Final[float]
    def __init__(self, **fields: float | str) -> None: ...
    def replace(self, **fields: float | str) -> TrainedModel: ...
    def to_dict(self) -> dict[str, Any]: ...

class Plan:
    micro_batches: Final[list[int]]
    plans: Final[list[Plan]]
    num_micro_batches: Final[int]
    sync: Final[str]
    exchanged_fraction: Final[float]
    predicted_times: Final[list[float]]
    topology: Final[Topology]
    workload: Final[WorkloadModel]
    d_model: Final[int]
    solver: Final[str]
    cluster: Final[Cluster]
    model: Final[TrainedModel]
    num_ranks: Final[int]
    num_sequences: Final[int]
    num_tokens: Final[int]
    seq_lens: Final[list[list[int]]]
    attention_pairs: Final[list[int]]
    masks: Final[list[str]]
    query_parts: Final[dict[int, int]]
    stages: Final[dict[int, int]]
    parts_of_sequence: Final[list[list[tuple[int, int, int, int, int]]]]
    sequence_works: Final[list[float]]
    bag_of_sequence: Final[list[int]]
    first_rank_of_sequence: Final[list[int]]
    degree_of_sequence: Final[list[int]]
    chunks: Final[list[tuple[int, int, int, int]]]
    chunk_works: Final[list[float]]
    chunk_lens: Final[list[list[int]]]
    sequences_on: Final[list[list[int]]]
    workload_before: Final[list[float]]
    workload_after: Final[list[float]]
    tokens_before: Final[list[int]]
    tokens_after: Final[list[int]]
    wir_before: Final[float]
    wir_after: Final[float]
    max_over_mean_before: Final[float]
    max_over_mean_after: Final[float]
    max_tokens: Final[int]
    max_tokens_per_rank: Final[int]
    settings: Final[list[tuple[str, str]]]
    tokens_moved: Final[int]
    attention_tokens_moved: Final[float]
    predicted_time: Final[float]
    lower_bound: Final[float]
    gap: Final[float]
    ideal_time: Final[float]
    def sequences_of(self, micro_batch: SupportsIndex) -> list[int]: ...
    def chunks_on(self, rank: SupportsIndex, micro_batch: SupportsIndex = ...) -> list[tuple[int, int, int]]: ...
    def home_sequences(self, rank: SupportsIndex, micro_batch: SupportsIndex) -> list[int]: ...
    def fill_ranks(self) -> Plan: ...
    def on(
        self, cluster: Cluster | str | None = ..., model: TrainedModel | None = ..., gamma: SupportsFloat | None = ...
    ) -> Plan: ...
    def validate(self) -> None: ...
    def to_json(self) -> str: ...
    @staticmethod
    def from_json(json: str) -> Plan: ...

class TopologyOption:
    topology: Final[str]
    predicted_time: Final[float]
    over_ideal: Final[float]

class Traffic:
    inside: Final[float]
    between: Final[float]
    total: Final[float]

class MicroBatchTime:
    token_s: Final[float]
    attention_s: Final[float]
    exchange_s: Final[float]
    host_s: Final[float]
    route_s: Final[float]
    fsdp_s: Final[float]
    fixed_s: Final[float]
    total_s: Final[float]
    ideal_s: Final[float]
    efficiency: Final[float]
    over_ideal: Final[float]
    terms: Final[dict[str, float]]
    route_bytes: Final[Traffic]
    attention_bytes: Final[Traffic]
    fsdp_bytes: Final[float]
    @staticmethod
    def labels() -> dict[str, str]: ...

# Private: their signatures are in knapformer.planning.
def plan(*arguments: Any) -> Plan: ...
def rank_topologies(*arguments: Any) -> list[TopologyOption]: ...
def predict_micro_batch(*arguments: Any) -> MicroBatchTime: ...
def plan_home(plan: Plan) -> Plan: ...
def plan_home_bags(plan: Plan) -> Plan: ...
def solver_names() -> list[str]: ...
def check_mask(mask: str) -> str: ...
def nested_topology(bag_ranks: int, num_bags: int) -> str: ...
def attention_pairs(mask: str, seq_len: SupportsIndex) -> int: ...
def head_shares(num_heads: int, num_kv_heads: int, degree: int) -> list[tuple[int, int]]: ...
