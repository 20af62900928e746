"""A folder is written whole or not at all, whoever else writes it, whatever kills the process, whatever is full."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_npu as npu
from lightning_npu.artifact_folder import _beside, new_folder
from lightning_npu.errors import CompileError
from lightning_npu.manifest import MANIFEST


def write(output: Path, content: str, *, overwrite: bool = False, meanwhile: object = None) -> None:
    with new_folder(output, overwrite=overwrite) as folder:
        (folder / MANIFEST).write_text(content)
        if callable(meanwhile):
            meanwhile()


def read(output: Path) -> str:
    return (output / MANIFEST).read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that prints ``ready`` when it is inside the block and goes on at the next line that it is given."""
    prelude = """
        import sys
        from pathlib import Path
        from lightning_npu.artifact_folder import new_folder
        from lightning_npu.errors import NPUError
        output = Path(sys.argv[1])
        def wait():
            print("ready", flush=True)
            sys.stdin.readline()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


WRITER = """
    try:
        with new_folder(output, overwrite=sys.argv[2] == "overwrite") as folder:
            (folder / "manifest.json").write_text(sys.argv[3])
            wait()
        print("wrote")
    except NPUError as error:
        print(error.what)
"""


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write(tmp_path / "a.npu", "half", meanwhile=fail)
    assert names(tmp_path) == []


def test_overwriting_is_asked_for_and_keeps_the_old_until_the_new_is_there(artifact_copy: Path) -> None:
    before = npu.Artifact.load(artifact_copy)
    with pytest.raises(npu.ArtifactError, match=r"exists already(.|\n)*overwrite=True"):
        write(artifact_copy, "new")
    with pytest.raises(RuntimeError), new_folder(artifact_copy, overwrite=True):
        raise RuntimeError
    assert npu.Artifact.load(artifact_copy).fingerprint == before.fingerprint
    write(artifact_copy, "new", overwrite=True)
    assert names(artifact_copy) == [MANIFEST]
    assert names(artifact_copy.parent) == [artifact_copy.name]


def test_a_folder_that_is_no_artifact_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(npu.ArtifactError, match="is not an artifact, so it is not overwritten"):
        write(tmp_path / "mine", "new", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


# ---- somebody else writes the same output


def test_what_appeared_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    output = tmp_path / "a.npu"
    with pytest.raises(npu.ArtifactError, match=rf"{output} appeared meanwhile(.|\n)*use what is there now"):
        write(output, "mine", meanwhile=lambda: write(output, "theirs"))
    assert read(output) == "theirs"
    assert names(tmp_path) == ["a.npu"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_or_link_that_appeared_meanwhile_stays(tmp_path: Path, overwrite: bool) -> None:
    with pytest.raises(npu.ArtifactError, match=r"appeared meanwhile|is not an artifact"):
        write(tmp_path / "a", "", overwrite=overwrite, meanwhile=lambda: (tmp_path / "a").write_text("theirs"))
    assert (tmp_path / "a").read_text() == "theirs"
    write(tmp_path / "real", "theirs")
    with pytest.raises(npu.ArtifactError, match="appeared meanwhile"):
        write(tmp_path / "b", "", overwrite=overwrite, meanwhile=lambda: (tmp_path / "b").symlink_to("real"))
    assert read(tmp_path / "b") == "theirs"
    assert names(tmp_path) == ["a", "b", "real"]


def test_with_overwrite_the_last_one_stays(tmp_path: Path) -> None:
    output = tmp_path / "a.npu"
    write(output, "mine", overwrite=True, meanwhile=lambda: write(output, "theirs"))
    assert read(output) == "mine"
    with pytest.raises(npu.ArtifactError, match="is not an artifact"):
        write(tmp_path / "b", "", overwrite=True, meanwhile=lambda: (tmp_path / "b" / "work").mkdir(parents=True))
    assert names(tmp_path) == ["a.npu", "b"]


@pytest.mark.parametrize("mode", ["keep", "overwrite"])
def test_of_two_processes_each_wins_or_is_told(tmp_path: Path, mode: str) -> None:
    output = tmp_path / "a.npu"
    writers = [child(WRITER, output, mode, text) for text in ("first", "second")]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:  # both are past the first look at the output
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    answers = sorted(writer.communicate()[0].strip() for writer in writers)
    if mode == "overwrite":
        assert answers == ["wrote", "wrote"]
    else:
        assert answers == [f"{output} appeared meanwhile: something else wrote it.", "wrote"]
    assert read(output) in ("first", "second")
    assert names(tmp_path) == ["a.npu"]


# ---- killed processes


def interrupt() -> None:
    raise InterruptedError


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, how: signal.Signals) -> None:
    output = tmp_path / "a.npu"
    writer = child(WRITER, output, "keep", "half")
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    with pytest.raises(InterruptedError):
        write(output, "", meanwhile=interrupt)
    assert len(names(tmp_path)) == 1  # it is alive, so its folder was left alone
    writer.send_signal(how)
    writer.communicate()
    assert len(names(tmp_path)) == 1
    (tmp_path / ".a.npu.new.notes").mkdir()  # of somebody else
    write(output, "whole")
    assert names(tmp_path) == [".a.npu.new.notes", "a.npu"]


def test_what_another_machine_left_is_removed_when_it_is_a_day_old(tmp_path: Path) -> None:
    left = tmp_path / ".a.npu.new.00000000.12345678"
    left.mkdir()
    write(tmp_path / "a.npu", "one")
    assert left.exists()
    os.utime(left, (0, 0))
    write(tmp_path / "a.npu", "two", overwrite=True)
    assert names(tmp_path) == ["a.npu"]


def test_an_old_folder_that_was_moved_aside_comes_back(artifact_copy: Path) -> None:
    """As after a kill between the two renames."""
    artifact_copy.rename(_beside(artifact_copy, "old"))
    with pytest.raises(npu.ArtifactError, match="exists already"):
        write(artifact_copy, "new")
    npu.Artifact.load(artifact_copy).verify()
    artifact_copy.rename(_beside(artifact_copy, "old"))
    write(artifact_copy.parent / "b.npu", "new")  # of another output: not touched
    write(artifact_copy, "new", overwrite=True)
    assert names(artifact_copy.parent) == ["b.npu", artifact_copy.name]
    assert read(artifact_copy) == "new"


# ---- links


def test_overwriting_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    write(tmp_path / "store" / "real.npu", "old")
    link = tmp_path / "link.npu"
    link.symlink_to(tmp_path / "store" / "real.npu")
    with pytest.raises(npu.ArtifactError, match=r"real\.npu exists already"):
        write(link, "new")
    write(link, "new", overwrite=True)
    assert link.is_symlink()
    assert read(tmp_path / "store" / "real.npu") == "new"
    assert names(tmp_path) == ["link.npu", "store"]
    assert names(tmp_path / "store") == ["real.npu"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_link_that_leads_nowhere_is_refused_at_once(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "link.npu").symlink_to(tmp_path / "gone")
    with pytest.raises(npu.ArtifactError, match=r"is a link to .*gone, which is not there(.|\n)*delete the link"):
        write(tmp_path / "link.npu", "", overwrite=overwrite, meanwhile=lambda: pytest.fail("work was done"))
    assert names(tmp_path) == ["link.npu"]


# ---- what cannot be written


def test_long_names_work_as_far_as_the_file_system_takes_them(tmp_path: Path) -> None:
    for name in ("n" * 240, "é" * 127):
        write(tmp_path / name, "one")
        write(tmp_path / name, "two", overwrite=True)
        assert read(tmp_path / name) == "two"
    assert len(names(tmp_path)) == 2
    with pytest.raises(npu.ArtifactError, match=r"cannot be written: File name too long(.|\n)*shorter name") as caught:
        write(tmp_path / ("n" * 5000), "", meanwhile=lambda: pytest.fail("work was done"))
    assert len(str(caught.value)) < 1000


def test_an_output_below_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "a.npu", tmp_path / "file" / "sub" / "a.npu"):
        with pytest.raises(npu.ArtifactError, match=r"cannot be written: (.|\n)*parents are folders"):
            write(output, "", meanwhile=lambda: pytest.fail("work was done"))


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, r"No space left on device(.|\n)*free space"),
        (errno.EDQUOT, r"quota(.|\n)*within your quota"),
        (errno.EROFS, r"Read-only file system(.|\n)*where this process may write"),
    ],
)
def test_a_full_disk_is_named_whatever_was_made_of_it(tmp_path: Path, number: int, message: str) -> None:
    def fail() -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise CompileError("The graph cannot be prepared.", remedy="report it") from error

    with pytest.raises(npu.ArtifactError, match=rf"a.npu cannot be written: (.|\n)*{message}"):
        write(tmp_path / "a.npu", "", meanwhile=fail)
    assert names(tmp_path) == []


def test_a_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    script = """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with new_folder(output, overwrite=False) as folder:
                (folder / "model.onnx").write_bytes(bytes(5000))
        except NPUError as error:
            print(error)
    """
    answer = child(script, tmp_path / "a.npu").communicate()[0]
    assert "a.npu cannot be written: File too large." in answer
    assert "ulimit -f" in answer
    assert names(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == limits


def test_a_users_own_failing_file_keeps_its_error(tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / "dataset" / "image.png").read_bytes()

    with pytest.raises(FileNotFoundError, match=r"image\.png"):
        write(tmp_path / "a.npu", "", meanwhile=fail)
    with pytest.raises(npu.ArtifactError, match="exists already"):
        write(tmp_path / "a.npu", "", meanwhile=lambda: write(tmp_path, ""))
    assert names(tmp_path) == []
