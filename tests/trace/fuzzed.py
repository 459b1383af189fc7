"""Readers of the extra `trace` that the fuzzer damages files for."""

from pathlib import Path

from specdec_jax.assembly import trace_files
from specdec_jax.trace import page
from tests.fuzz.reader import LINES, Reader


def _render(folder: Path) -> None:
  page.render(trace_files.read(folder / 'trace.jsonl'))


READERS = {'trace_page': Reader('trace', 'trace.jsonl', _render, LINES)}
