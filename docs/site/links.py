"""Links to the repository, from one place.

    python docs/site/links.py

writes the address that CITATION.cff has as `repository-code` into the README,
docs and notebooks. A fork changes it there; tests/test_docs.py compares all.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
  'README.md',
  'CONTRIBUTING.md',
  'docs/**/*.md',
  'notebooks/*.ipynb',
)
_HOST = 'https://github.com/'
# What comes before OWNER/NAME in each kind of link to this repository.
_LINKS = re.compile(
  r'(?P<before>git clone https://github\.com/'
  r"|REPOSITORY = 'https://github\.com/"
  r'|https://colab\.research\.google\.com/github/'
  r'|https://github\.com/(?=[\w.-]+/[\w.-]+/actions/))'
  r'(?P<name>[\w.-]+/[\w.-]+)'
)


def repository() -> str:
  """OWNER/NAME of this repository on GitHub."""
  text = (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
  address = re.search(r"^repository-code: '(.*)'$", text, re.MULTILINE)[1]
  if not address.startswith(_HOST):
    raise ValueError(f'repository-code is not on GitHub: {address}')
  return address.removeprefix(_HOST).strip('/')


def pages() -> list[Path]:
  """The files that may link to the repository."""
  return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def names(text: str) -> list[str]:
  """OWNER/NAME in each link to the repository."""
  return [link['name'] for link in _LINKS.finditer(text)]


def relinked(text: str, name: str) -> str:
  """The text with all links to the repository led to OWNER/NAME."""
  return _LINKS.sub(lambda link: link['before'] + name, text)


def main() -> None:
  name = repository()
  for path in pages():
    text = path.read_text(encoding='utf-8')
    if (new := relinked(text, name)) != text:
      path.write_text(new, encoding='utf-8')
      print(path.relative_to(ROOT))


if __name__ == '__main__':
  main()
