"""The output of a sink's libraries is limited in size."""

from pathlib import Path

from potluck.server.sinks.output_log import EARLIER, OUTPUT, cut


def test_the_newest_half_is_kept_and_printing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / OUTPUT
    cut(tmp_path)  # there is none yet
    with path.open("ab", buffering=0) as printing:
        for line in (b"one.", b"two.", b"three."):
            printing.write(line)
            cut(tmp_path, 8)
        assert (path.read_bytes(), (tmp_path / EARLIER).read_bytes()) == (b"", b"ree.")
        printing.write(b"four.")
        cut(tmp_path, 8)
    assert (path.read_bytes(), (tmp_path / EARLIER).read_bytes()) == (b"four.", b"ree.")


def test_an_end_that_is_a_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / EARLIER).mkdir()
    (tmp_path / OUTPUT).write_bytes(b"much")
    cut(tmp_path, 2)
    assert (tmp_path / OUTPUT).read_bytes() == b"much"
