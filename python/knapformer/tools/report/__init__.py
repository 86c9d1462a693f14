"""Plans to look at: one HTML file that opens offline, and a timeline for Perfetto.

write_report("plan.html", plan)                                    needs plotly: pip install 'knapformer[report]'
json.dump(predicted_timeline(plan), file)
"""

from __future__ import annotations

from knapformer.tools.report.page import write_report
from knapformer.tools.report.timeline import predicted_timeline

__all__ = ["predicted_timeline", "write_report"]
