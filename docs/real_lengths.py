"""Writes lengths of public data sets as `knapformer doctor` reads them, for docs/sensitivity.md.

    python docs/real_lengths.py --laion laion-aesthetics-data-design --activitynet TextDiffs --coco evaluate --out real

The options name checkouts of the GitHub repositories that hold the sizes: AxelDona/laion-aesthetics-data-design
(4ab5aa2; pictures of LAION-Aesthetics), Unleashing-Text-Potentials/TextDiffs (b588d16; the videos of ActivityNet
Captions for training, with the times of what is described) and ruizewang/evaluate (1152656; COCO's val2017).

    coco.json     5,000 photographs of at most 640 pixels a side, as they are
    laion.json    pictures, reduced to at most a megapixel
    clips.json    what each caption of ActivityNet describes, at most 5 s of it, as 832 x 480 at 16 frames a second
    joint.json    the pictures of laion.json, and the first clip of each video
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MAX_PIXELS, MAX_SECONDS, FPS = 2**20, 5, 16


def pictures(rows: list[dict[str, Any]]) -> list[dict[str, int]]:
    found = []
    for row in rows:
        scale = min(1.0, (MAX_PIXELS / max(1, row["width"] * row["height"])) ** 0.5)
        sides = {side: round(row[side] * scale) for side in ("width", "height")}
        if min(sides.values()) >= 16:  # a token
            found.append({**sides, "frames": 1})
    return found


def clip(start_s: float, end_s: float) -> dict[str, int]:
    return {"width": 832, "height": 480, "frames": 1 + round(FPS * min(MAX_SECONDS, max(0.0, end_s - start_s)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("laion", "activitynet", "coco", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    laion = pictures(json.loads((args.laion / "image_data.json").read_text()))
    coco = pictures(json.loads((args.coco / "annotations/captions_val2017.json").read_text())["images"])
    videos = json.loads((args.activitynet / "data/ActivityNet/train.json").read_text()).values()
    clips = [clip(*times) for video in videos for times in video["timestamps"]]
    first = [clip(*video["timestamps"][0]) for video in videos]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, samples in {"coco": coco, "laion": laion, "clips": clips, "joint": [*laion, *first]}.items():
        (args.out / f"{name}.json").write_text(json.dumps(samples))
        print(f"{name}: {len(samples):,} samples")


if __name__ == "__main__":
    main()
