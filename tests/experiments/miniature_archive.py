"""A miniature of Debian's archive: a repository that apt itself can read."""

import gettext
import hashlib
import io
import shutil
import struct
import tarfile

SUITE = 'miniature'
NUM_PACKAGES = 300
# Every package has one text that others share, and others of its own.
SHARED = (
  'This package contains the documentation of the program.',
  'Dieses Paket enthält die Dokumentation des Programms.',
)
MESSAGES = {
  '': 'Content-Type: text/plain; charset=UTF-8\n',
  'menu\x04~File': '~Datei',
  'page\x04Hori_zontal:': 'Hor_izontal:',
  'page\x04Black & White': 'Schwarz & Weiß',
  'page\x04Use FILTER_NAME here': 'Hier FILTER_NAME verwenden',
  'page\x04%PRODUCTNAME document': '%PRODUCTNAME-Dokument',
  'one page\0%1 pages': 'eine Seite\0%1 Seiten',
  'lost\x04Page %1 of %2': 'Seite %1',
  'markup\x04<b>Bold</b>': '<b>Fett</b>',
  'same\x04Calc': 'Calc',
}
_PAGE = """<html><body><p>Navigation</p>
<h1 id="hd_id1">{0}</h1>
<p id="par_id2">{1} <span class="switchinline"><span hidden="true" id="MACx"
class="MAC">Cmd <span>F</span></span><span hidden="true" id="defaultx"
>{2}</span>
</span>.</p><pre id="code">skipped</pre></body></html>"""


def word(i: int) -> str:
  """A word that only i has: letters alone, so that it is no version."""
  letters = ''
  for _ in range(3):
    i, letter = divmod(i, 26)
    letters += chr(ord('a') + letter)
  return f'x{letters}x'


def packages() -> list[tuple[str, str, int]]:
  """Names, source packages and texts: two versions of each source."""
  return [
    (f'{word(i)}{version}-data', f'{word(i)}-{version}', i)
    for i in range(NUM_PACKAGES)
    for version in (11, 12)
  ]


def descriptions(language: str, i: int, name: str) -> list[str]:
  """Lines of a description."""
  own = word(i)
  if language == 'en':
    return [
      f'tool {own} for the measurement of time',
      f'The program {own} measures how long the {name} programs run on this',
      'machine. It was written by the people who use it.',
      '.',
      SHARED[0],
    ]
  return [
    f'Werkzeug {own} für das Messen von Zeit',
    f'Das Programm {own} misst, wie lange die {name}-Programme auf diesem',
    'Rechner laufen. Es wurde von den Leuten geschrieben, die es verwenden.',
    '.',
    SHARED[1],
  ]


def write_repository(root) -> None:
  """Writes `dists/` and `pool/`."""
  index = root / 'dists' / SUITE / 'main'
  (root / 'pool').mkdir(parents=True)
  binaries, translations = [], {'en': [], 'de': []}
  for name, source, i in packages():
    lines = {side: descriptions(side, i, name) for side in translations}
    text = lines['en'][0] + '\n' + ''.join(f' {s}\n' for s in lines['en'][1:])
    md5 = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    binaries.append(
      f'Package: {name}\nSource: {source} (1-2)\nVersion: 1\n'
      f'Architecture: all\nDescription: {lines["en"][0]}\n'
      f'Description-md5: {md5}\nFilename: pool/none.deb\nSize: 1\n'
      f'SHA256: {"0" * 64}\n'
    )
    for side, own in lines.items():
      rest = '\n'.join(f' {line}' for line in own[1:])
      translations[side].append(
        f'Package: {name}\nDescription-md5: {md5}\n'
        f'Description-{side}: {own[0]}\n{rest}\n'
      )
  binaries += [_binary(root, name, files) for name, files in _debs().items()]
  contents = {f'i18n/Translation-{s}': t for s, t in translations.items()}
  sums = []
  for name, stanzas in {**contents, 'binary-amd64/Packages': binaries}.items():
    path = index / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(stanzas), encoding='utf-8')
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    sums.append(f' {digest} {len(content)} main/{name}')
  (index.parent / 'Release').write_text(
    f'Origin: Debian\nSuite: {SUITE}\nCodename: {SUITE}\nVersion: 1.0\n'
    'Date: Sat, 01 Jan 2028 00:00:00 UTC\nArchitectures: amd64\n'
    'Components: main\nSHA256:\n' + '\n'.join(sums) + '\n'
  )


def write_downloads(repository, folder) -> None:
  """Writes what apt makes of the repository."""
  lists, packages_folder = folder / 'lists', folder / 'packages'
  lists.mkdir(parents=True)
  packages_folder.mkdir()
  dist = repository / 'dists' / SUITE
  for path in sorted(dist.rglob('*')):
    if path.is_file():
      name = str(path.relative_to(dist)).replace('/', '_')
      shutil.copy(path, lists / f'mirror_debian_dists_{SUITE}_{name}')
  for path in (repository / 'pool').iterdir():
    shutil.copy(path, packages_folder)


def catalogue(messages: dict[str, str]) -> bytes:
  """A .mo file."""
  sides = (
    [m.encode() for m in messages],
    [t.encode() for t in messages.values()],
  )
  count, start = len(messages), 28
  tables, texts = b'', b''
  offset = start + 16 * count
  for side in sides:
    for text in side:
      tables += struct.pack('<2I', len(text), offset + len(texts))
      texts += text + b'\0'
  header = struct.pack(
    '<7I', 0x950412DE, 0, count, start, start + 8 * count, 0, offset
  )
  content = header + tables + texts
  gettext.GNUTranslations(io.BytesIO(content))  # Python can read it, too.
  return content


def _debs() -> dict[str, dict[str, bytes]]:
  """Files by path, by package."""
  pages = {
    'en': ('Printing {0}', 'Choose {0} and press the key', 'Ctrl'),
    'de': ('{0} drucken', 'Wählen Sie {0} und drücken Sie', 'Strg'),
  }

  def help_files(language: str, folder: str) -> dict[str, bytes]:
    root = f'./usr/share/libreoffice/help/{folder}'
    files = {f'{root}/index.html': b'<p id="par_id1">no text</p>'}
    for i in range(100):
      texts = (text.format(word(i + 900)) for text in pages[language])
      page = _PAGE.format(*texts)
      files[f'{root}/text/shared/{word(i)}.html'] = page.encode()
    return files

  resources = './usr/lib/libreoffice/program/resource/de/LC_MESSAGES'
  return {
    'libreoffice-help-en-us': help_files('en', 'en-US'),
    'libreoffice-help-de': help_files('de', 'de'),
    'libreoffice-l10n-de': {f'{resources}/sc.mo': catalogue(MESSAGES)},
  }


def _binary(root, name: str, files: dict[str, bytes]) -> str:
  """Writes a .deb; its stanza."""
  members = {
    'debian-binary': b'2.0\n',
    'control.tar.xz': _tar({'./control': f'Package: {name}\n'.encode()}),
    'data.tar.xz': _tar(files),
  }
  content = b'!<arch>\n'
  for member, data in members.items():
    header = f'{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(data):<10}`\n'
    content += header.encode() + data + b'\n' * (len(data) % 2)
  path = root / 'pool' / f'{name}_1_all.deb'
  path.write_bytes(content)
  return (
    f'Package: {name}\nSource: libreoffice\nVersion: 1\nArchitecture: all\n'
    f'Description: files\nDescription-md5: {"0" * 32}\n'
    f'Filename: pool/{path.name}\nSize: {len(content)}\n'
    f'SHA256: {hashlib.sha256(content).hexdigest()}\n'
  )


def _tar(files: dict[str, bytes]) -> bytes:
  buffer = io.BytesIO()
  with tarfile.open(fileobj=buffer, mode='w:xz') as tree:
    for name, content in files.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      tree.addfile(member, io.BytesIO(content))
  return buffer.getvalue()
