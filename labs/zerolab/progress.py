"""A progress bar that suits where it is shown: a terminal line, a notebook cell (which it leaves empty), or nothing in a log."""

from __future__ import annotations

import sys
import threading

from tqdm import tqdm


def in_notebook() -> bool:
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Progress:
    """`total` units of work; `say` what is being done, `update` when a unit is done. It redraws by itself while nothing happens."""

    def __init__(self, total: int, text: str, show: bool = True):
        self.handle = None
        notebook = show and in_notebook()
        terminal = show and not notebook and sys.stderr.isatty()
        form = "{desc} |{bar:20}| {n_fmt}/{total_fmt} {elapsed}"
        self.bar = tqdm(total=total, desc=text, leave=False, disable=not (terminal or notebook), bar_format=form, gui=notebook)
        if notebook:
            from IPython.display import display

            self.handle = display(self._html(), display_id=True)
        self.ended = threading.Event()
        if terminal or notebook:
            threading.Thread(target=self._tick, daemon=True).start()

    def _html(self, text=None):
        from IPython.display import HTML

        text = self._text() if text is None else text
        return HTML(f"<code>{text}</code>" if text else "")

    def _text(self) -> str:
        return tqdm.format_meter(**{**self.bar.format_dict, "ncols": 120})

    def _tick(self):
        while not self.ended.wait(1.0):
            self._redraw()

    def _redraw(self):
        if self.handle:
            self.handle.update(self._html())
        else:
            self.bar.refresh()

    def say(self, text: str):
        self.bar.set_description_str(text, refresh=False)

    def update(self, units: int = 1):
        self.bar.n += units

    def note(self, text: str):
        """A line that stays, such as a variant that failed."""
        if self.handle:
            print(text)
        else:
            tqdm.write(text, file=sys.stderr)

    def close(self):
        self.ended.set()
        if self.handle:
            self.handle.update(self._html(""))
        self.bar.close()
