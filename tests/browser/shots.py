"""python tests/browser/shots.py FOLDER [PAGE ...]: pictures of pages of the built book: light, dark, phone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from browser import SITE, Visit, browser, served  # noqa: E402

out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
pages = sys.argv[2:] or sorted(str(p.relative_to(SITE).with_suffix("")) for p in SITE.glob("[bl][oa]*/*.html"))
with served() as address, browser() as running:
    for page in pages:
        for name, options in {"light": {}, "dark": {"dark": True}, "phone": {"width": 390}}.items():
            with Visit(running, address, f"{page}.html", **options) as visit:
                visit.page.screenshot(path=out / f"{page.replace('/', '_')}_{name}.png", full_page=True)
                print(page, name, visit.errors, visit.foreign, visit.broken)
