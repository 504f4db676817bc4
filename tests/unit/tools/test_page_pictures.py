"""The picture of a running round shows distinct reasons and current texts of the web UI.

`page_pictures.py` writes the texts that it photographs beside the picture.
"""

import json
import re

from support.repository import ROOT

TEXTS = json.loads((ROOT / "docs/images/page-round.json").read_text(encoding="utf-8"))
PAGE = ROOT / "page/potluck/page/static"


def test_picture_has_the_table_headers_of_the_web_ui() -> None:
    source = (PAGE / "live_round.js").read_text(encoding="utf-8")
    assert TEXTS["headers"] == re.findall(r'{ title: "([^"]+)"', source)


def test_picture_shows_distinct_reasons_of_the_selector() -> None:
    columns = len(TEXTS["headers"])
    reasons = TEXTS["cells"][TEXTS["headers"].index("Why it was chosen") :: columns]
    first, *others = reasons
    source = (ROOT / "server/potluck/server/selectors/fedentopt.py").read_text(encoding="utf-8")
    assert f'"{first}"' in source
    gains = [re.fullmatch(r"entropy ([+-]\d\.\d\d) bit", reason) for reason in others]
    assert 'f"entropy {after - before:+.2f} bit"' in source
    assert len(gains) == 5
    assert all(gains)
    assert len({gain[1] for gain in gains if gain}) == 5
