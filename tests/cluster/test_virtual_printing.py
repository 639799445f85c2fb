"""What ranks print reaches no terminal raw, and is otherwise what they printed."""

import logging
import sys
import threading

import pytest

import overlaplab as ol


def printed(capsys, fn):
    ol.run(fn, world_size=1)
    return capsys.readouterr()


def test_control_characters_of_a_rank_are_shown_as_text(capsys):
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj.exe"

    def fn():
        print(hostile)
        print(hostile, file=sys.stderr)
        sys.stdout.writelines([hostile, "\n"])
        thread = threading.Thread(target=print, args=(hostile,))
        thread.start()
        thread.join()

    out, err = printed(capsys, fn)
    shown = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj.exe" + "\n"
    assert out == 3 * shown
    assert err == shown


def test_logs_made_in_a_rank_are_shown_as_text(capsys):
    def fn():
        log = logging.Logger("of a rank")
        log.addHandler(logging.StreamHandler())
        log.error("\x1b[31mlogged")

    _, err = printed(capsys, fn)
    assert err == r"\x1b[31mlogged" + "\n"


@pytest.mark.parametrize(
    "text",
    ["a\nb\tc\n", "\r 10 %|#    |\r100 %|#####|\n", "gr\u00fc\u00df \u2588\n", ""],
)
def test_ordinary_text_and_progress_bars_are_as_they_were(capsys, text):
    out, _ = printed(capsys, lambda: sys.stdout.write(text))
    assert out == text
    assert ol.run(lambda: sys.stdout.write("\x1b"), world_size=1).values == (1,)


def test_in_a_rank_no_stream_is_a_terminal_and_afterwards_all_are_as_before(
    monkeypatch,
):
    class Terminal:
        written = ""

        def write(self, text):
            self.written += text
            return len(text)

        def isatty(self):
            return True

    mine = Terminal()
    monkeypatch.setattr(sys, "stdout", mine)
    assert ol.run(lambda: sys.stdout.isatty(), world_size=1).values == (False,)
    assert sys.stdout is mine
    print("\x1b[1mbold")
    assert mine.written == "\x1b[1mbold\n"


def test_without_streams_a_run_is_right(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert ol.run(lambda: print("nowhere"), world_size=1).values == (None,)
