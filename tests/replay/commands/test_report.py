"""The page of a run shows what its log holds, works offline, and draws and sorts in a browser."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import replay
from actor_init.as_json import to_json
from actor_init.spec import UsageError
from replay.command_line.cli import main
from replay.commands.report.page import describe_changes
from replay.options.option_parsing import spec_from_dict
from replay.profiling.profile_records import (
    Holder,
    HolderKind,
    LongKernel,
    MemoryPeak,
    MemoryProfile,
    Profile,
    RankProfile,
    Saving,
)
from replay.runner.out_of_memory import OutOfMemory, PredictedNeed
from replay.runner.result import Run
from tests.helpers.commands import LIMIT, ROOT
from tests.helpers.made_logs import passed, write_log
from tests.helpers.made_records import cost
from tests.helpers.repeated import repeated_by
from tests.warm import warm_bin

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IN_BROWSER = """
<script>
window.onload = () => {
  const find = (text) => [...document.querySelectorAll("table.sorts th button")].filter((b) => b.textContent === text);
  const button = find("real").at(-1);
  const column = [...button.closest("tr").cells].indexOf(button.parentElement);
  const cells = () => [...button.closest("table").tBodies[0].rows].map((row) => row.cells[column].textContent);
  button.click();
  const rising = cells();
  button.click();
  const sizes = [...document.querySelectorAll("svg")].map((one) => one.getBBox().width * one.getBBox().height);
  const fits = document.documentElement.scrollWidth <= window.innerWidth;
  const result = {rising, falling: cells(), sizes, errors: window.errors, fits};
  document.body.innerHTML = `<pre id="result">${JSON.stringify(result)}</pre>`;
};
</script>
"""


class Page(HTMLParser):
    """What a page shows: text by tag, the attributes of tags, and the rows of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.counts: dict[str, int] = {}
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._in_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("logs")
    for name, rest in (("first", []), ("second", ["--no-packing"])):
        short = ["--skip-inputs", "13", "--max-inputs", "3"]
        options = [*short, "--dtype", "fp32", "--quiet", "--log-folder", str(home), "--name", name, *rest]
        subprocess.run([str(warm_bin() / "replay"), *options], cwd=ROOT, check=True, capture_output=True, timeout=LIMIT)
    return {path.name.rpartition("-")[2]: path for path in home.iterdir()}


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]


def test_the_page_of_a_run_shows_every_pass_of_its_log(logs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["report", str(logs["first"]), "--to", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    head = next(row for row in page.rows if row[:2] == ["pass", "input"])
    shown = [dict(zip(head, row, strict=True)) for row in page.rows if len(row) == len(head) and row != head]
    for row, line in zip(shown, written(logs["first"]), strict=True):
        assert row["real"] == f"{line['real_tokens']:,}"
        assert float(row["fwd ms"].replace(",", "")) == pytest.approx(
            line["phases"]["forward"]["seconds"] * 1e3, abs=0.06
        )
        assert row["loss"] == f"{line['loss']:.5f}"
    assert [row["not counted"] for row in shown] == ["warm-up", "", ""]
    assert page.counts["rect"] == 3 * 2 * 3  # passes; forward and backward, real and padding; time, memory, tokens
    run = json.loads((logs["first"] / "run.json").read_text())
    [command] = [text for text in page.texts if text.startswith("replay ")]
    assert repeated_by(command) == (spec_from_dict(run["spec"]), 1, "")
    assert any(text.startswith(run["verdict"]["outcome"]) for text in page.texts)


def test_what_a_profile_and_a_snapshot_found_is_shown(logs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "log"
    shutil.copytree(logs["first"], folder)
    kernel = LongKernel(name="flash_fwd", module="model.layers.3", count=4, seconds=0.25)
    shares = RankProfile(
        seconds=1.0,
        seconds_by_work={"attention": 0.25, "gaps": 0.75},
        hidden_communication_seconds=0.0,
        longest=[kernel],
        collective_seconds=[],
        timeline="rank0.profile.json.gz",
    )
    held = MemoryProfile(
        peak_bytes=2**31,
        counted_bytes=2**31,
        reserved_bytes=2**31,
        ran_out=None,
        holders=[Holder(kind=HolderKind.WEIGHTS, name="", num_bytes=2**31, count=3)],
        snapshot="rank0.memory.pickle",
    )
    found = {
        "profile": to_json(Profile(index=1, source="a.pkl", device="cuda", ranks=[shares])),
        "memory": to_json(MemoryPeak(index=1, source="a.pkl", ranks=[held])),
    }
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | found))
    for name in ("rank0.profile.json.gz", "rank0.memory.pickle"):
        (folder / name).touch()

    assert main(["report", str(folder)]) == 0

    page = Page((folder / "report.html").read_text())
    assert ["attention", "250.0", "25.0%"] in page.rows
    assert ["flash_fwd", "model.layers.3", "4", "250.0"] in page.rows
    assert ["weights", "-", "3", "2.000", "100.0%"] in page.rows
    links = {value for _, name, value in page.attributes if name == "href"}
    assert {"rank0.profile.json.gz", "rank0.memory.pickle"} <= links
    failed = OutOfMemory(
        index=1,
        rank=0,
        weights_bytes=2**30,
        gradients_bytes=0,
        optimizer_bytes=0,
        device_bytes=None,
        needed=PredictedNeed(
            num_measured=4, peak_bytes=2**33, error=None, savings=[Saving(option="--num-layers 1", peak_bytes=2**31)]
        ),
    )
    on_cpu = replace(held, device="cpu", reserved_bytes=None, snapshot="rank0.memory.json.gz")
    cpu = MemoryPeak(index=1, source="a.pkl", ranks=[on_cpu])
    changed = run | {"out_of_memory": to_json(failed), "memory": to_json(cpu)}
    (folder / "run.json").write_text(json.dumps(changed))
    (folder / "rank0.memory.json.gz").touch()
    assert main(["report", str(folder)]) == 0
    page = Page((folder / "report.html").read_text())
    assert {"Out of memory", "resident at the peak"} <= set(page.texts)
    assert any(text.startswith("by prediction, --num-layers 1: 2.000 GiB") for text in page.texts)
    assert "rank0.memory.json.gz" in {value for _, name, value in page.attributes if name == "href"}
    (folder / "run.json").write_text(json.dumps(run | {"profile": {"index": "x"}}))
    assert main(["report", str(folder)]) == 0
    texts = Page((folder / "report.html").read_text()).texts
    assert any("run.json: profile" in text for text in texts), "a foreign profile is a problem, not a failure"


def test_it_works_offline(logs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["report", str(logs["first"]), str(logs["second"]), "--to", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    outside = [value for _, name, value in Page(text).attributes if name in ("src", "href", "data") and ":" in value]
    assert outside == []
    assert not re.search(r"@import|url\(|fetch\(|https?://", text)


def test_what_names_hold_is_text_and_no_markup(logs: dict[str, Path], tmp_path: Path) -> None:
    name = "\"'><script>alert(1)</script>&"
    folder = tmp_path / name.replace("/", ":")
    shutil.copytree(logs["first"], folder)
    lines = [line | {"source": name, "error": name, "error_type": name} for line in written(folder)]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(folder), "--to", str(tmp_path / "page.html")]) == 0
    plain = tmp_path / "plain.html"
    assert main(["report", str(logs["first"]), "--to", str(plain)]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert page.counts["script"] == Page(plain.read_text()).counts["script"] == 1
    assert any(name in row for row in page.rows)
    assert folder.name in page.texts
    assert {value for _, key, value in page.attributes if key == "href"} <= {f"{folder.name}/log_probs"}


def test_two_runs_beside_each_other_show_what_changed(logs: dict[str, Path], tmp_path: Path) -> None:
    assert main(["report", str(logs["first"]), str(logs["second"]), "--to", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert ["packing", "yes", "no"] in page.rows
    a, b = (written(logs[name]) for name in ("first", "second"))
    ratios = [row[4] for row in page.rows if len(row) == 10 and row[0].startswith(("rank0 #", "rank1 #"))]
    sums = [[sum(phase["seconds"] for phase in line["phases"].values()) for line in lines] for lines in (a, b)]
    assert ratios == [f"{after / before:.3f}" for before, after in zip(*sums, strict=True)]


def test_a_log_that_is_cut_short_is_shown_as_far_as_it_came(
    logs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(logs["first"], broken)
    lines = (broken / "rank0.jsonl").read_text()
    (broken / "rank0.jsonl").write_text(lines[:-40])
    run = json.loads((broken / "run.json").read_text())
    del run["exit_code"], run["verdict"], run["statistics"]
    (broken / "run.json").write_text(json.dumps(run))
    assert main(["report", str(broken)]) == 0
    said = capsys.readouterr().out
    assert "broken: rank0.jsonl is cut short in line 3" in said
    assert "broken: run.json has no end: the run goes on, or was killed" in said
    report = replay.report(broken)
    assert (report.path, len(report.problems), report.exit_code) == (broken / "report.html", 2, 0)
    assert main(["report", str(broken), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report.to_dict()
    page = Page((broken / "report.html").read_text())
    assert [row[0] for row in page.rows if len(row) > 5 and row[0].isdigit()] == ["1", "2"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "holds no run"),
        (lambda path: (path / "run.json").write_text("[]"), "holds a list, not a run"),
        (lambda path: (path / "run.json").write_text('{"format": 7}'), "was written in format 7"),
        (lambda path: (path / "run.json").write_text('{"format": 1}'), "run.json names no devices"),
        (lambda path: (path / "run.json").write_bytes(b"\xff\x00"), "cannot be read"),
    ],
)
def test_a_foreign_folder_is_refused_in_one_line(
    make: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_page_is_of_one_to_26_runs_and_goes_where_it_can_be_written(logs: dict[str, Path], tmp_path: Path) -> None:
    for number in (0, 27):
        with pytest.raises(UsageError, match=rf"1 to 26 logs fit on one page, not {number}"):
            replay.report(*[logs["first"]] * number)
    with pytest.raises(UsageError, match=r"No such file or directory\. Give a file that can be written, as to="):
        replay.report(logs["first"], to=tmp_path / "nowhere" / "page.html")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize("size", ["1200,900", "400,800"])
def test_a_browser_draws_every_picture_and_sorts_the_table(logs: dict[str, Path], tmp_path: Path, size: str) -> None:
    path = tmp_path / "page.html"
    assert main(["report", str(logs["first"]), str(logs["second"]), "--to", str(path)]) == 0
    text = path.read_text()
    catch = "<script>window.errors = []; window.onerror = (message) => window.errors.push(message);</script>"
    path.write_text(text.replace("<head>", f"<head>{catch}").replace("</body>", f"{IN_BROWSER}</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={size}", "--enable-logging=stderr"]
    done = subprocess.run(
        [str(CHROMIUM), *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    found = re.search(r'<pre id="result">(.*?)</pre>', done.stdout)
    assert found, done.stdout[-2000:]
    result = json.loads(found[1])
    assert result["errors"] == []
    assert "CONSOLE" not in done.stderr, done.stderr
    assert len(result["sizes"]) == text.count("<svg ")
    assert all(size > 0 for size in result["sizes"])
    numbers = [line["real_tokens"] for line in written(logs["second"])]
    assert [int(cell.replace(",", "")) for cell in result["rising"]] == sorted(numbers)
    assert [int(cell.replace(",", "")) for cell in result["falling"]] == sorted(numbers, reverse=True)
    assert result["fits"]


def test_passes_of_two_runs_stand_side_by_side_where_both_have_them(tmp_path: Path) -> None:
    boom: dict[str, Any] = {"phases": {}, "error": "boom", "error_type": "ValueError", "loss": None}
    slower: dict[str, Any] = {"phases": {"forward": cost(0.5, 3.0), "backward": cost(0.25)}, "loss": 2.5}
    first = [*(passed(0, "a", rank=rank) for rank in range(2)), passed(1, "b"), passed(2, "c"), passed(3, "d", **boom)]
    other = [passed(0, "d"), passed(1, "c", **boom), passed(2, "a", rank=1, **slower)]
    runs = [Run.read(write_log(tmp_path / str(number), records)) for number, records in enumerate((first, other))]
    [change] = describe_changes(runs)
    assert change.heading == "B beside A"
    # One failed here or there, and one was not replayed; of a the second rank has a partner.
    assert {title: values[0] for title, values in change.tables["Passes"].items()} == {
        "input": "a.pkl",
        "rank": "1",
        "A ms": "750.0",
        "B ms": "750.0",
        "time ratio": "1.000",
        "A GiB": "2.000",
        "B GiB": "3.000",
        "peak ratio": "1.500",
        "A loss": "2",
        "B loss": "2.5",
    }
    assert len(change.tables["Passes"]["input"]) == 1
