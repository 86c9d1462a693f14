"""Plans to look at: one HTML file that opens offline, and timelines for Perfetto.

write_report("plan.html", plan)                                    needs plotly: pip install 'knapformer[report]'
json.dump(predicted_timeline(plan, hardware, model), file)
with profiled_steps("rank0.json", rank=0): ...                     a real run, by torch.profiler
"""

from __future__ import annotations

from knapformer.report.page import check_can_report, check_report, write_report
from knapformer.report.timeline import merged, predicted_timeline, profiled_steps

__all__ = ["check_can_report", "check_report", "merged", "predicted_timeline", "profiled_steps", "write_report"]
