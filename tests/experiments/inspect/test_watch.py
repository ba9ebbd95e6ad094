"""`fedmuon watch`: who may look, what is read while a run grows, and what a browser shows of it."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from browser import PATIENT, dom, in_one_font
from conftest import small

from fedmuon.core.files import Record, sealed
from fedmuon.experiments.cli import main
from fedmuon.experiments.inspect import watch
from fedmuon.experiments.inspect.watch import Server, rounds_since, runs_of, watched
from fedmuon.experiments.run import execute
from fedmuon.runs.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[3]
PRIVATE = {"local": {"recipe": "dp-muon"}, "privacy": {"noise": 4.0, "lot": 5.0}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 rounds, of which two are evaluated."""
    execute(small(), folder := tmp_path_factory.mktemp("watch") / "run & <b>one</b>")
    return folder


@pytest.fixture
def growing(finished: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """The same before its first round, and the lines that its rounds append."""
    folder = shutil.copytree(finished, tmp_path / "growing")
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    for name in ("rounds.jsonl", "summary.json"):
        (folder / name).unlink()
    return folder, lines


@contextlib.contextmanager
def served(folder: Path, kind: type[Server] = Server) -> Iterator[Server]:
    """A page that is served while this lasts."""
    with kind(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def asked(
    server: Server, path: str, host: str = "localhost", method: str = "GET"
) -> tuple[http.client.HTTPResponse, str]:
    """The answer to a request with that Host, and its content."""
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    with contextlib.closing(link):
        link.request(method, path, headers={"Host": host})
        return (answer := link.getresponse()), answer.read().decode()


def get(server: Server, path: str, *given: str, **more: str) -> tuple[int, str]:
    """Status and content."""
    answer, content = asked(server, path, *given, **more)
    return answer.status, content


def told(server: Server, path: str) -> Record:
    """The JSON that lies below the page's address."""
    status, content = get(server, urlsplit(server.url).path + path)
    assert status == 200, content
    return json.loads(content)


def append(folder: Path, text: str) -> None:
    """As one more write of a run."""
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(text)


def test_only_this_machine_that_knows_the_path_is_answered(finished: Path) -> None:
    with served(finished) as server, served(finished) as other:
        path = urlsplit(server.url).path
        assert server.server_address[0] == "127.0.0.1" and len(path) > 22
        assert server.url != other.url
        hosts = dict.fromkeys(("127.0.0.1", "localhost:9000"), 200)
        others = "", "evil.example", "127.0.0.1.evil.example", f"evil.example:{server.server_port}"
        hosts |= dict.fromkeys(others, 403)
        assert {host: get(server, path, host)[0] for host in hosts} == hosts
        wrong = ("/", "/x/", path[:-2] + "/", path[:-1], "/é/", "//[", path + "config.toml",
                 path + "../rounds.jsonl", path + "runs/", urlsplit(other.url).path)  # fmt: skip
        assert {one: get(server, quote(one))[0] for one in wrong} == dict.fromkeys(wrong, 404)
        for run in ("..", "../x", "/etc", "nobody", ""):
            assert get(server, f"{path}rounds?run={quote(run)}")[0] == 404
        assert get(server, path, method="POST")[0] == 501


def test_the_page_asks_nobody_else(finished: Path) -> None:
    with served(finished) as server:
        path = urlsplit(server.url).path
        answer, page = asked(server, path)
        script, style = (get(server, path + name)[1] for name in ("page.js", "page.css"))
    found = re.findall(r"\w+://[^\"]+", page + script + style)
    assert found == ["http://www.w3.org/2000/svg"]  # the name of a namespace
    rule = answer.headers["Content-Security-Policy"]
    assert rule.startswith("default-src 'none'; connect-src 'self'; script-src 'self'; ")
    scripts = re.findall("<script[^>]*>", page)
    assert "<style" not in page and scripts == ['<script defer src="page.js">']
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_what_is_appended_is_told_once_and_whole(growing: tuple[Path, list[str]]) -> None:
    folder, lines = growing
    with served(folder) as server:
        (run,) = told(server, "runs")["runs"]
        ask = f"rounds?run={quote(run['name'])}&from="
        assert (run["state"], run["total"], "size" in run) == ("unfinished", 8, False)
        assert run["again"].endswith("growing --resume")
        assert told(server, ask)["rounds"] == []
        append(folder, lines[0] + lines[1][:30])
        first = told(server, ask)
        assert [one["round"] for one in first["rounds"]] == [1] and first["afresh"]
        half = told(server, ask + first["at"])
        assert half["rounds"] == [] and half["at"] == first["at"] and not half["afresh"]
        append(folder, lines[1][30:] + lines[2])
        more = told(server, ask + first["at"])
        assert [one["round"] for one in more["rounds"]] == [2, 3] and not more["afresh"]
        assert told(server, "runs")["runs"][0]["size"] == more["at"]
        RunDirectory(folder).cut_back(1)  # as --resume does
        again = told(server, ask + more["at"])
        assert [one["round"] for one in again["rounds"]] == [1] and again["afresh"]


def test_a_long_file_is_read_in_parts(
    growing: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lines = growing
    append(folder, "".join(lines))
    monkeypatch.setattr(watch, "PART", 1)  # a part is a line at least
    at, seen, more = "", [], True
    while more:
        part = rounds_since(folder, at)
        at, seen, more = part["at"], [*seen, *part["rounds"]], part["more"]
        assert len(part["rounds"]) == 1
    wanted = RunDirectory(folder).records()
    assert [one["round"] for one in seen] == [one["round"] for one in wanted]
    assert [one.get("accuracy") for one in seen] == [one.get("accuracy") for one in wanted]


@pytest.mark.parametrize("since", ["", "x", "1", "1-", "-1", "1-9", "9" * 40, "²-²"])
def test_a_place_of_another_file_is_its_start(finished: Path, since: str) -> None:
    assert len(rounds_since(finished, since)["rounds"]) == 8
    inode = (finished / "rounds.jsonl").stat().st_ino
    assert rounds_since(finished, f"{inode}-{10**12}")["afresh"]


def test_damage_faults_and_what_is_no_number(growing: tuple[Path, list[str]]) -> None:
    folder, lines = growing
    fault = {"client": 4, "attempt": 2, "why": "no <answer>"}
    odd = {"round": 3, "faults": [fault], "dropped": [4], "client_loss": float("nan")}
    append(folder, lines[0] + lines[1].replace('"round": 2', '"round": 9'))
    append(folder, sealed(odd, RunDirectory(folder).mark) + sealed(odd, "another run"))
    found = rounds_since(folder, "")
    assert found["damaged"] == 2 and [one["round"] for one in found["rounds"]] == [1, 3]
    assert found["rounds"][1] == {
        "round": 3, "faults": ["client 4: no <answer>"], "dropped": [4],
    }  # fmt: skip


def test_runs_below_a_folder(finished: Path, growing: tuple[Path, list[str]]) -> None:
    folder = growing[0].parent
    shutil.copytree(finished, folder / "deep" / "done")
    (folder / "mine").mkdir()
    (folder / "mine" / "config.toml").write_text("")  # a config is no run
    os.utime(folder / "deep" / "done" / "schedule.npy", (1, 1))
    assert [*runs_of(folder)] == ["growing", "deep/done"]  # newest first
    damaged = folder / "deep" / "done" / "summary.json"
    damaged.write_text(damaged.read_text().replace("8", "9"))
    lock = growing[0] / ".lock"
    with served(folder) as server:
        one, other = told(server, "runs")["runs"]
        assert one["state"] == "unfinished" and other["state"] == "damaged"
        assert "summary.json does not match" in other["why"]
        lock.write_text(f"process {os.getpid()} on {socket.gethostname()} (fedmuon run)")
        assert told(server, "runs")["runs"][0]["state"] == "running"
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        lock.write_text(f"process {ended.pid} on {socket.gethostname()} (fedmuon run)")
        assert told(server, "runs")["runs"][0]["state"] == "unfinished"


def test_a_private_run_says_what_is_not_released(tmp_path: Path) -> None:
    execute(small(**PRIVATE), tmp_path / "p")
    with served(tmp_path) as server:
        (run,) = told(server, "runs")["runs"]
    assert "not released" in run["note"] and "model.safetensors" in run["spent"]["released"]
    assert run["spent"]["epsilon"] > 0 and "lot = 5" in dict(run["card"])["privacy"]


def test_a_watched_run_has_the_same_bytes(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", str(finished / "config.toml"), "--out", str(tmp_path / "a"), "--watch"])
    assert end.value.code == 0
    assert re.search(
        r"Watch the run at http://127\.0\.0\.1:\d+/[\w-]{22}/", capsys.readouterr().out
    )
    for name in ("config.toml", "model.safetensors", "momentum.safetensors", "schedule.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (finished / name).read_bytes()
    assert not [one for one in threading.enumerate() if "serve_forever" in one.name]


@pytest.mark.slow
def test_a_run_goes_on_without_its_page(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path) -> Server:
        raise OSError(24, "Too many open files")

    said: list[str] = []
    with monkeypatch.context() as patch, watched(finished, said.append):
        patch.setattr(watch, "Server", refused)
    assert "Watch the run at" in said[0]
    monkeypatch.setattr(watch, "Server", refused)
    with watched(finished, said.append):
        said.append("ran")
    assert "Too many open files" in said[1] and said[2] == "ran"


def test_a_run_goes_on_whatever_its_page_does(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(watch, "runs_of", lambda folder: 1 / 0)
    said: list[str] = []
    with watched(finished, said.append):
        url = urlsplit(said[0].split()[-1])
        link = http.client.HTTPConnection("127.0.0.1", url.port or 0, timeout=30)
        with contextlib.closing(link), pytest.raises(http.client.RemoteDisconnected):
            link.request("GET", f"{url.path}rounds")
            link.getresponse()
        said.append("ran")
    assert said[1] == "ran" and "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_it(finished: Path) -> None:
    command = [sys.executable, "-m", "fedmuon", "watch", str(finished)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0 and not process.stdout.read()


def test_what_cannot_be_watched_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["watch", str(tmp_path / "nowhere")])
    assert end.value.code == 2 and "is not a folder" in " ".join(capsys.readouterr().err.split())


def test_a_page_that_is_looked_at_has_the_end(finished: Path) -> None:
    """The command waits for two more requests, if there was one lately."""
    with served(finished) as server:
        server.linger()
        told(server, "runs")
        ended = threading.Event()
        waiting = threading.Thread(target=lambda: (server.linger(), ended.set()))
        waiting.start()
        while waiting.is_alive():
            told(server, "runs")
        assert ended.is_set()


class Grows(Server):
    """Appends a line whenever a page looks, and at last writes the summary."""

    lines: list[str]
    end: bytes

    def answer(self, hosts: list[str], target: str) -> tuple[int, str, bytes]:
        """As ever, a round later."""
        folder = self.folder
        if target.endswith("/runs") and self.lines:
            append(folder, self.lines.pop(0))
        elif target.endswith("/runs"):
            (folder / "summary.json").write_bytes(self.end)
        return super().answer(hosts, target)


class Framed(Server):
    """Also has the page in two frames of 390 pixels, one with something that is too wide."""

    def answer(self, hosts: list[str], target: str) -> tuple[int, str, bytes]:
        """As ever, but for the frames and what they measure."""
        if target != "/frames":
            status, kind, content = super().answer(hosts, target)
            return status, kind, in_one_font(content.decode()).encode()
        frame = f'<iframe src="{self.url}" width="390" frameborder="0"></iframe>'
        script = """setTimeout(() => {
            const [one, wide] = [frames[0].document, frames[1].document];
            wide.querySelector("h1").style.width = "900px";
            const widths = [one, wide].map(each => each.documentElement.scrollWidth);
            const drawn = one.querySelectorAll("svg path").length;
            document.body.textContent = [...widths, drawn].join(" ");
        }, 5000)"""
        return 200, "text/html", f"<body>{frame}{frame}<script>{script}</script></body>".encode()


@pytest.mark.needs_browser
def test_the_browser_draws_rounds_as_they_come(
    finished: Path, growing: tuple[Path, list[str]], tmp_path: Path, chromium: str
) -> None:
    folder, Grows.lines = growing
    Grows.end = (finished / "summary.json").read_bytes()
    with served(folder, Grows) as server:
        shown = dom(chromium, server.url, tmp_path, PATIENT)
    last = RunDirectory(finished).records()[-1]
    assert "✓ finished" in shown and "round 8 of 8" in shown and "growing" in shown
    assert f"accuracy {last['accuracy']:.4g} in round 8" in shown
    drawn = re.findall(r'<path class="c" d="(M[^"]+)"', shown)
    assert len(drawn) == 2 and drawn[0].count("L") == 7  # the curve of all rounds, and its key


@pytest.mark.needs_browser
def test_the_page_fits_a_telephone(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chromium: str
) -> None:
    monkeypatch.setattr(watch, "HEADERS", {})  # no frame may hold the page
    with served(finished, Framed) as server:
        url = f"http://127.0.0.1:{server.server_port}/frames"
        shown = dom(chromium, url, tmp_path, PATIENT)
    found = re.search(r"<body[^>]*>(\d+) (\d+) (\d+)<", shown)
    assert found and int(found[1]) <= 390 < int(found[2]) and int(found[3]) > 8, shown


def test_the_page_has_a_word_for_every_state(
    finished: Path, growing: tuple[Path, list[str]]
) -> None:
    folder, _ = growing
    words = (watch.PAGE / "page.js").read_text().partition("WORDS = {")[2]
    states = [watch.about("a", finished)["state"], watch.about("a", folder)["state"]]
    (folder / "failed.txt").write_text("not finite")
    states.append(watch.about("a", folder)["state"])
    assert states[0] == "finished" and states[2] == "failed"
    for one in [*states, "running", "unfinished", "lost", "damaged"]:
        assert f'{one}: "' in words.partition("}")[0]
