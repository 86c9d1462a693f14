"""Plans to look at: one HTML file that opens offline, and timelines for Perfetto.

write_report("plan.html", plan)                                    needs plotly: pip install 'knapformer[report]'
json.dump(predicted_timeline(plan), file)
with profiled_steps("rank0.json", rank=0): ...                     a real run, by torch.profiler
"""

from __future__ import annotations

from knapformer.tools.report.page import NO_BALANCER, PLANNED_STEP, write_report
from knapformer.tools.report.timeline import merged, predicted_timeline, profiled_steps

__all__ = ["NO_BALANCER", "PLANNED_STEP", "merged", "predicted_timeline", "profiled_steps", "write_report"]
