"""Plans to look at: one HTML file that opens offline. Needs plotly: pip install 'knapformer[report]'."""

from __future__ import annotations

from knapformer.tools.report.page import measured_of, write_report

__all__ = ["measured_of", "write_report"]
