"""The report of a plan: its bars hold what the plan says, and a browser draws them offline."""

import re
import shutil
import subprocess

import pytest
from knapformer.tools.cli import main

import knapformer as kf

pytest.importorskip("plotly")
from knapformer.tools.plan import report

LENGTHS = [[300, 20], [5, 7], [], [1000], [64], [65], [1], [900, 33]]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@pytest.mark.parametrize("topology", ["g4n2", "g1n8", "g8n1", "g4/2/1n2"])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_bars_hold_what_the_plan_says(topology, mask, monkeypatch):
    plan = kf.plan(LENGTHS, topology, d_model=16, gamma=0.5, mask=mask)
    bars, mean = report.placement(plan).data, sum(plan.workload_before) / 8
    for of, work in zip(bars, (plan.workload_before, plan.workload_after), strict=True):
        for rank in range(8):
            here = sum(y for x, y in zip(of.x, of.y, strict=True) if x == rank)
            assert mean * here == pytest.approx(work[rank])
    assert any("1,000 tokens<br>" in hover and "home: rank 3" in hover for hover in bars[1].hovertext)
    monkeypatch.setattr(report, "_MAX_RANKS", 4)
    assert max(rank for of in report.placement(plan).data for rank in of.x) == 3


# Once all is drawn, it writes what it sees into the document.
PROBE = """<pre id="probe"></pre><script>
const seen = document.getElementById("probe");
window.addEventListener("error", event => { seen.textContent = event.message; });
const waiting = setInterval(() => {
  const bars = document.querySelectorAll(".js-plotly-plot .point").length;
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  if (bars) { clearInterval(waiting); seen.textContent = bars + " bars, " + wide + " too wide"; }
}, 100);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (tests/system_packages.sh)")
@pytest.mark.parametrize(("num_ranks", "width"), [(2, 1280), (32, 500), (256, 1280)])
def test_a_browser_draws_every_bar_offline(num_ranks, width, tmp_path):
    page = tmp_path / "report.html"
    if num_ranks == 2:  # a model for one processor
        plan = kf.plan([[440, 430], [437]], "g2n1", d_model=64, solver="greedy")
    else:
        lengths = kf.DataMix.parse("joint").draw_lengths(0, 0, num_ranks)
        plan = kf.plan(lengths, f"g8/4/2/1n{num_ranks // 8}", d_model=3072)
    report.write_report(str(page), plan)
    text = page.read_text()
    assert not re.search(r"\b(src|href)\s*=|url\(|@import", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
    assert len(text) < 12e6 and f"{plan.wir_before:.2f} → {plan.wir_after:.2f}" in text
    assert ("the first 128 ranks" in text) == (num_ranks == 256)
    page.write_text(text.replace("</body>", PROBE))
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",  # offline
        f"--window-size={width},900", "--virtual-time-budget=60000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    document = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    drawn = sum(map(len, plan.seq_lens[:128])) + sum(rank < 128 for _, rank, *_ in plan.chunks)
    assert re.findall(r'<pre id="probe">(.*?)</pre>', document) == [f"{drawn} bars, 0 too wide"]


def test_a_step_is_drawn_by_its_longest_micro_batch(tmp_path):
    page, path = tmp_path / "x.html", tmp_path / "step.json"
    args = ["plan", "--topology", "g8n4", "--data", "mixed", "--micro-batches", "3"]
    assert main([*args, "--report", str(page), "--json", str(path)]) == 0
    step, shown = kf.Plan.from_json(path.read_text()), page.read_text()
    step_s = [kf.predict_micro_batch(of).total_s for of in step.plans]
    longest = step_s.index(max(step_s))
    assert f"of 3 micro-batches number {longest}, which" in shown and f"Predicted: {sum(step_s):.4g} s a step" in shown


def test_a_missing_package_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = ["plan", "--topology", "g8n4", "--data", "mixed", "--report", str(tmp_path / "x.html")]
    assert main(args) == 2 and list(tmp_path.iterdir()) == []
    assert "--report: needs plotly, which this environment lacks: pip install" in capsys.readouterr().err
