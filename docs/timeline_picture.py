"""Draws the beginning of a timeline: what Perfetto shows of it, for a page.

knapformer plan --data joint --ranks 32 --topology g8/4/2/1n4 --timeline timeline.json
python docs/timeline_picture.py timeline.json docs/pictures/timeline.png
"""

from __future__ import annotations

import json
import sys

import matplotlib.pyplot as plt

# Names begin or end so; the first that fits counts.
COLOURS = {
    "wait": "#d9d9d9",
    "attention, whole": "#2b8cd6",
    "attention, shared": "#56B4E9",
    "pre_attn": "#E69F00",
    "post_attn": "#D55E00",
    "route": "#009E73",
    "per-token layers": "#CC79A7",
}
SHOWN_MS = 45  # `route` and the first blocks


def main(trace: str, picture: str) -> None:
    with open(trace) as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    figure, axes = plt.subplots(figsize=(12, 4.6), layout="constrained")
    for event in events:
        start, length = event["ts"] / 1e3, event["dur"] / 1e3
        kind = next((kind for kind in COLOURS if event["name"].startswith(kind) or event["name"].endswith(kind)), None)
        if kind is None or start > SHOWN_MS:
            continue
        rank, exchanges = divmod(event["tid"], 2)
        axes.barh(rank + 0.4 * exchanges, length, 0.36, start, color=COLOURS[kind], edgecolor="white", linewidth=0.3)
    axes.set(xlim=(0, SHOWN_MS), xlabel="ms", yticks=[rank + 0.2 for rank in range(8)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(8)])
    axes.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, COLOURS, ncols=len(COLOURS), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
