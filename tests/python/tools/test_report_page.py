"""The report in a browser: opens offline, draws every chart, in light and dark, with no label over another."""

import functools
import html
import json
import re
import shutil
import subprocess

import pytest
from knapformer.tools.cli import main
from knapformer.tools.report.page import HtmlPage, write_report

import knapformer as kf

pytest.importorskip("plotly")
np = pytest.importorskip("numpy")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (tests/system_packages.sh)")

# The page stands in a frame, since a window of Chromium is never narrower than 500 pixels. Once all is drawn, PROBE
# looks at it from inside and writes what it sees into the document around it.
FRAME = """<body style="margin: 0"><pre id="probe"></pre>
<iframe style="border: 0; width: @WIDTH@px; height: 2900px" srcdoc="@PAGE@"></iframe>"""
PROBE = """
<script>
const tell = seen => { parent.document.getElementById("probe").textContent = JSON.stringify(seen); };
window.addEventListener("error", event => tell(event.message));
window.addEventListener("unhandledrejection", event => tell(String(event.reason)));
const waiting = setInterval(async () => {
  if (!document.documentElement.dataset.drawn) return;
  clearInterval(waiting);
  const report = { charts: [], overlaps: [], outside: [] };
  const leaves = (place, box, f) => {
    if (box.left < f.left - 1 || box.right > f.right + 1 || box.top < f.top - 1 || box.bottom > f.bottom + 1)
      report.outside.push(place);
  };
  const page = document.documentElement.getBoundingClientRect();
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    const marks = chart.querySelectorAll(".point, .js-line, .hm, path.box").length;
    const ticks = [...chart.querySelectorAll(".xtick text")].map(tick => tick.textContent);
    const legend = chart.closest("section").querySelector("ul").textContent;
    report.charts.push({ id: chart.id, marks, ticks, x: Array.from(chart.data[0].x || []),
                         unnamed: chart.data.filter(t => t.name && !legend.includes(t.name)).length });
    const frame = chart.getBoundingClientRect();
    leaves(chart.id, frame, page);
    const labels = [...chart.querySelectorAll("text")]
      .filter(t => t.textContent.trim() && !t.closest(".bars"))
      .map(t => ({ text: t.textContent, box: t.getBoundingClientRect() })).filter(t => t.box.width > 0);
    for (const t of labels) leaves(chart.id + ": " + t.text, t.box, frame);
    for (let i = 0; i < labels.length; ++i) for (let j = i + 1; j < labels.length; ++j) {
      const a = labels[i].box, b = labels[j].box;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 2) report.overlaps.push(chart.id + ": " + labels[i].text + " / " + labels[j].text);
    }
  }
  for (const of of document.querySelectorAll("header, p, li, td, th, figcaption, .figures *")) {
    const words = document.createRange();
    words.selectNodeContents(of);  // a word may be wider than its element
    leaves(of.textContent, words.getBoundingClientRect(), page);
  }
  const bars = document.getElementById("chart1");
  if (bars.layout.xaxis2) Plotly.Fx.hover(bars, [{ curveNumber: 1, pointNumber: 0 }], "x2y2");
  await new Promise(done => setTimeout(done, 200));
  report.hover = [...bars.querySelectorAll(".hoverlayer text")].map(t => t.textContent).join(" ");
  report.width = window.innerWidth;
  report.sideways = document.documentElement.scrollWidth - window.innerWidth;
  const colours = (query, of) => [...document.querySelectorAll(query)].map(mark => getComputedStyle(mark)[of]);
  report.panel = colours("section", "backgroundColor")[0];
  report.inks = [...colours(".js-plotly-plot text:not(.bartext)", "fill"), ...colours("h1, h2, p, li, td", "color")];
  tell(report);
}, 100);
</script>
"""


@functools.cache
def _plan(num_ranks):
    if num_ranks == 2:  # a model for one processor
        return kf.plan([[440, 430], [437]], "g2n1", d_model=64, solver="greedy")
    mix, topology = (
        ("g4b3i256f1s0,g2b2i512f1s0,g2b1i1024f1s0", "g4/2/1n2") if num_ranks == 8 else ("joint", "g8/4/2/1n*")
    )
    topology = topology.replace("*", str(num_ranks // 8))
    return kf.plan(
        kf.DataMix.parse(mix).draw_lengths(0, 0, num_ranks), topology, d_model=3072, gamma=0.41, solver="balanced"
    )


def _chromium(tmp_path, page, *arguments, dark=False, width=1280, height=2900):
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # offline
        f"--window-size={width},{height}", "--virtual-time-budget=60000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        *arguments, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture(params=[2, 8, 1024], scope="module")
def report(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(str(path), _plan(request.param))
    return request.param, path


def test_nothing_is_loaded_from_elsewhere(report):
    _, path = report
    page = path.read_text()
    markup = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)\s*=|url\(|@import", markup)
    assert "@" not in re.sub(r"@media", "", markup)  # no place of the template is left
    assert len(page) < 12e6


def _probed(tmp_path, path, width=1280, dark=False):
    """What PROBE sees in the page: all charts drawn, nothing cut, faint or over anything else, on a desk or a phone."""
    page, frame = path.read_text().replace("</body>", PROBE + "</body>"), tmp_path / "frame.html"
    frame.write_text(FRAME.replace("@WIDTH@", str(width)).replace("@PAGE@", html.escape(page)))
    document = _chromium(tmp_path, frame, "--dump-dom", dark=dark)
    found = re.search(r'<pre id="probe">(.+?)</pre>', document, flags=re.DOTALL)
    assert found, "the page did not finish drawing"
    seen = json.loads(html.unescape(found[1]))
    assert isinstance(seen, dict), seen
    assert seen["width"] == width
    assert len(seen["charts"]) == path.read_text().count('<div id="chart') >= 2
    assert all(chart["marks"] > 0 and not chart["unnamed"] for chart in seen["charts"]), seen["charts"]
    assert seen["overlaps"] == []
    assert seen["outside"] == []
    assert seen["sideways"] <= 0
    assert (_contrast(seen["panel"], "rgb(0, 0, 0)") < 5) == dark
    assert min(_contrast(ink, seen["panel"]) for ink in seen["inks"]) > 4.5
    return seen


def _contrast(*colours):
    """Of WCAG 2: 1 to 21, 4.5 or more for text and 3 or more for marks."""
    channels = np.array([re.findall(r"\d+", colour)[:3] for colour in colours], dtype=float) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return (light + 0.05) / (dark + 0.05)


@in_browser
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_every_chart_is_drawn_and_legible(report, dark, width, tmp_path):
    num_ranks, path = report
    seen = _probed(tmp_path, path, dark=dark, width=width)
    plan = _plan(num_ranks)
    bars = seen["charts"][1]["marks"]
    drawn = [rank for _, rank, *_ in plan.chunks if rank < 128]  # of more ranks the first ones
    assert bars == sum(map(len, plan.seq_lens[:128])) + len(drawn)
    assert "home: rank" in seen["hover"]
    assert "tokens" in seen["hover"]


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_step_of_many_micro_batches(width, tmp_path):
    lengths = kf.DataMix.parse("joint").draw_lengths(0, 0, 32)
    step = kf.plan([lens * 40 for lens in lengths], "g8n4", d_model=3072, gamma=0.41, micro_batches=40)
    write_report(str(tmp_path / "step.html"), step)
    _probed(tmp_path, tmp_path / "step.html", width=width)


@in_browser
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 390)])
def test_the_doctors_page_is_drawn_and_legible(dark, width, tmp_path):
    path, figures = tmp_path / "doctor.html", tmp_path / "doctor.json"
    command = ["doctor", "--data", "joint", "--micro-batches", "2", "--steps", "3"]
    assert main([*command, "--report", str(path), "--json", str(figures)]) == 0
    assert "Take the balancer" in path.read_text()
    shares, lengths = _probed(tmp_path, path, dark=dark, width=width)["charts"]
    of = [round(100 * alternative["efficiency"]) for alternative in json.loads(figures.read_text())["alternatives"]]
    assert set(map(round, shares["x"])) == set(of) and len(shares["x"]) < len(of)  # those alike are one
    assert {"2k", "20k"} <= set(lengths["ticks"])


def test_alternatives_alike_are_one(tmp_path):
    (tmp_path / "same.json").write_text(json.dumps([[4096] * 2] * 8))
    assert main(["doctor", str(tmp_path / "same.json"), "--steps", "2", "--report", str(tmp_path / "same.html")]) == 0
    page = (tmp_path / "same.html").read_text()
    names = re.findall(r"<tr><td>(.*?)</td>", page.replace("<wbr>", ""))
    assert names[0].startswith(
        "no balancing; lockstep buckets; longest first; BalancedBatchSampler; balancer, 1-2 ranks;"
    )
    assert len(names) == 7


def test_text_in_titles_is_escaped(tmp_path):
    target = tmp_path / "a.html"
    from knapformer.tools.report import charts

    page = HtmlPage()
    page.add("Times", "", charts.stacked_bars({"</script>": {"work": 1.0}}, "seconds"))
    page.write(str(target), "</script><b>@CHARTS@", "", [], {})
    page = target.read_text()
    assert page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;b&gt;@CHARTS@" in page


def test_missing_packages_are_named(monkeypatch, tmp_path):
    from knapformer.tools import files

    monkeypatch.setitem(files._NEEDED, "--report", ("plotly", "no_such_package"))
    with pytest.raises(kf.ArgumentError, match="needs no_such_package, which this environment lacks"):
        write_report(str(tmp_path / "plan.html"), _plan(8))
    assert list(tmp_path.iterdir()) == []
