"""Plans to look at: one HTML file that opens offline. Needs plotly: pip install 'knapformer[report]'."""
