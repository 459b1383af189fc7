"""Pages of the documentation site, a hook of MkDocs; see mkdocs.yml.

The site has the paths of the repository, so that a link between two files is
right in both. The API is read from the tree of the package, without importing
it, and notebooks are rendered as they are, without executing them.
"""

import ast
import re
import textwrap
from pathlib import Path

import nbconvert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent.parent
_PACKAGE = _ROOT / 'specdec_jax'
# Commands have --help, and T5X's plug-in needs T5X.
_NOT_API = ('cli', 'integrations')
_SHOWN = (
  '*.md',
  'CITATION.cff',
  'LICENSE',
  'docs/*.md',
  'docs/design/*.md',
  'docs/**/*.svg',
  'experiments/**/*.md',
  'experiments/**/*.svg',
  'notebooks/*.ipynb',
  'specdec_jax/pretrained/*/*.md',
  'specdec_jax/pretrained/*/*.svg',
)
_NO_HEADING = """\
    options:
      show_root_heading: false
      show_root_toc_entry: false"""
_FENCE_IN_LIST = re.compile(r'^( {2,3})```.*?^\1```$', re.MULTILINE | re.DOTALL)
_NOTEBOOK_LINK = re.compile(r'(\]\((?!\w+:)[^)#]+)\.ipynb\b')
_REMOTE_IMAGE = re.compile(r'!\[([^]]*)\]\(https?:[^)]*\)')
# Pictures of the state of a repository, which say nothing as words.
_BADGE = re.compile(
  r'\[!\[[^]]*\]\(https://(?:img\.shields\.io|github\.com)/[^)]*\)\]\([^)]*\)\n?'
)
_FILE_LINK = re.compile(r'\[[\w/]+\.md\]\((?!\w+:)([\w./]+\.md)(#[\w-]+)?\)')
_REMOTE = re.compile(
  r'<(?:img|script|link|iframe|source)\b[^>]*\s(?:src|href)=.?(?:https?:)?//[^>]*'
)


def on_config(config: MkDocsConfig) -> None:
  notebooks = sorted(path.stem for path in _ROOT.glob('notebooks/*.ipynb'))
  config.nav += [
    {'Notebooks': [f'notebooks/{name}.md' for name in notebooks]},
    {
      'API': [
        {'Packages': 'api/index.md'},
        *({page: f'api/{page}.md'} for page in _api()),
      ]
    },
  ]


def on_files(files: Files, config: MkDocsConfig) -> None:
  for pattern in _SHOWN:
    for path in sorted(_ROOT.glob(pattern)):
      uri = path.relative_to(_ROOT).as_posix()
      files.append(File.generated(config, uri, abs_src_path=str(path)))
  for path in sorted(_ROOT.glob('notebooks/*.ipynb')):
    for uri, content in _notebook(path).items():
      files.append(File.generated(config, uri, content=content))
  pages = {'index': _api_index()}
  pages |= {page: _api_page(page, modules) for page, modules in _api().items()}
  for page, content in pages.items():
    files.append(File.generated(config, f'api/{page}.md', content=content))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
  """Links lead to the rendered notebooks, and read as the title of a page and
  not as its file; no image is on another host, and no badge is left."""
  # GitHub takes code in a list at the text's column, Python-Markdown at four.
  four = lambda code: textwrap.indent(code[0], ' ' * (4 - len(code[1])))
  markdown = _BADGE.sub('', _FENCE_IN_LIST.sub(four, markdown))
  folder = (_ROOT / page.file.src_uri).parent

  def titled(link: re.Match) -> str:
    path = folder / link[1]
    if not path.is_file():  # One that is made here.
      return link[0]
    title = path.read_text(encoding='utf-8').partition('\n')[0]
    return f'[{title.lstrip("# ").split(":")[0]}]({link[1]}{link[2] or ""})'

  markdown = _FILE_LINK.sub(titled, markdown)
  return _REMOTE_IMAGE.sub(r'\1', _NOTEBOOK_LINK.sub(r'\1.md', markdown))


def on_post_page(output: str, page, **_: object) -> None:
  for remote in _REMOTE.findall(output):
    raise PluginError(f'{page.file.src_uri} is not whole offline: {remote}')


def _notebook(path: Path) -> dict[str, str | bytes]:
  """The page of a notebook and the pictures of its outputs, by address."""
  markdown, resources = nbconvert.MarkdownExporter().from_filename(
    str(path), resources={'unique_key': path.stem}
  )
  outputs = resources.get('outputs', {})
  page = nbconvert.filters.strip_ansi(markdown)
  return {f'notebooks/{path.stem}.md': page} | {
    f'notebooks/{name}': content for name, content in outputs.items()
  }


def _api() -> dict[str, list[str]]:
  """The modules on each page of the API: those of a package share one."""
  pages = {}
  for path in sorted(_PACKAGE.rglob('*.py')):
    *packages, module = path.relative_to(_PACKAGE).with_suffix('').parts
    if module.startswith('_') or (packages or [module])[0] in _NOT_API:
      continue
    page = '.'.join(packages) or module
    pages.setdefault(page, []).append('.'.join([*packages, module]))
  return pages


def _api_page(page: str, modules: list[str]) -> str:
  """The page's own docstring under its title, then modules with headings."""
  lines = [f'# {page}', '', f'::: {_PACKAGE.name}.{page}', _NO_HEADING]
  if modules != [page]:
    lines += ['      members: false', '']
    lines += [f'::: {_PACKAGE.name}.{module}\n' for module in modules]
  return '\n'.join(lines)


def _api_index() -> str:
  """What each page is about: the first paragraph of its docstring."""
  lines = ['# API', '', '| | |', '|---|---|']
  for page in _api():
    path = _PACKAGE.joinpath(*page.split('.'))
    path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8')))
    promise = ' '.join((docstring or '').split('\n\n')[0].split())
    lines.append(f'| [{page}]({page}.md) | {promise} |')
  return '\n'.join(lines)
