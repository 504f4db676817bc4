"""The output of a sink's libraries is limited in size."""

from pathlib import Path

from potluck.server.sinks.sink_process import EARLIER, OUTPUT, cut


def test_full_output_log_is_moved_aside_while_printing_continues(tmp_path: Path) -> None:
    path = tmp_path / OUTPUT
    cut(tmp_path)  # no log exists yet
    with path.open("ab", buffering=0) as printing:
        for line in (b"one.", b"two.", b"three."):
            printing.write(line)
            cut(tmp_path, 8)
        assert (path.read_bytes(), (tmp_path / EARLIER).read_bytes()) == (b"", b"ree.")
        printing.write(b"four.")
        cut(tmp_path, 8)
    assert (path.read_bytes(), (tmp_path / EARLIER).read_bytes()) == (b"four.", b"ree.")


def test_output_log_is_unchanged_if_the_earlier_log_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / EARLIER).mkdir()
    (tmp_path / OUTPUT).write_bytes(b"much")
    cut(tmp_path, 2)
    assert (tmp_path / OUTPUT).read_bytes() == b"much"
