"""Debian's archive: indices and packages in a folder, fetched by apt or found.

The folder holds apt's `lists/`, with the release files, and the packages' .deb
files in `packages/`. Everything is checked against the release's SHA-256 sums.
"""

import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.corpora import descriptions

LANGUAGES = ('en', 'de')
PACKAGES = (
  'libreoffice-l10n-de',
  'libreoffice-help-de',
  'libreoffice-help-en-us',
)
# Reads and writes nothing of the system's own lists and caches, runs none of
# its hooks, and stores indices as plain text.
_APT_CONFIG = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear Acquire::Languages;
Acquire::Languages {{ {languages} }};
Acquire::GzipIndexes "false";
Acquire::Retries "2";
APT::Sandbox::User "{user}";
Dir::State "{folder}/state";
Dir::State::Lists "{folder}/lists";
Dir::Cache "{folder}/cache";
"""
_VERSION_NUMBER = re.compile(r'-?\d[\d.]*(?=-|$)')
_SUM = re.compile(r' ([0-9a-f]{64}) +\d+ (\S+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Archive:
  """Checked files of the archive.

  Attributes:
    release: fields of the release file: origin, codename, version and date.
    translations: Translation indices by language.
    source_packages: source package by package, where the two differ.
    debs: .deb files by package.
    versions: versions of those packages.
    sha256: checksums by file, as the archive names them.
  """

  release: Mapping[str, str]
  translations: Mapping[str, Path]
  source_packages: Mapping[str, str]
  debs: Mapping[str, Path]
  versions: Mapping[str, str]
  sha256: Mapping[str, str]

  def group(self, package: str) -> str:
    """The source package of a package, without version numbers.

    `gcc-11` and `gcc-12` say nearly the same, and must share a split.
    """
    source = self.source_packages.get(package, package)
    return _VERSION_NUMBER.sub('', source) or source


def download(folder: Path, packages: Sequence[str] = PACKAGES) -> None:
  """Has apt fetch indices and packages into a folder.

  The host's own sources are used; its state is not touched.

  Args:
    folder: created if missing.
    packages: to fetch; may be none.

  Raises:
    ValueError: if the host has no apt, or apt fails, with apt's reason.
  """
  if shutil.which('apt-get') is None:
    raise ValueError(
      "Debian's archive is reached through apt, which this host does not have: "
      'run this on a Debian host with --keep_downloads FOLDER, and here with '
      '--from_dir FOLDER'
    )
  folder = folder.absolute()
  for name in ('lists/partial', 'cache/archives/partial', 'state', 'packages'):
    (folder / name).mkdir(parents=True, exist_ok=True)
  config = folder / 'apt.conf'
  config.write_text(
    _APT_CONFIG.format(
      folder=folder,
      languages=' '.join(f'"{language}";' for language in LANGUAGES),
      # Root's folder is closed to the user that apt would otherwise become.
      user='root' if os.geteuid() == 0 else '_apt',
    )
  )
  complaint = _run_apt(config, folder, 'update')
  # An index that cannot be had is no error to apt.
  if not _german_indices(folder / 'lists'):
    raise ValueError(
      'apt-get update brought no German index of a Debian release: '
      f'{complaint or "the sources of this host have none"}'
    )
  if packages:
    _run_apt(config, folder / 'packages', 'download', *packages)
  config.unlink()
  for name in ('cache', 'state'):
    shutil.rmtree(folder / name)


def _run_apt(config: Path, folder: Path, *command: str) -> str:
  """Runs apt-get there; its first complaint, or ''.

  Raises:
    ValueError: with that complaint, if apt fails.
  """
  done = subprocess.run(
    ['apt-get', '-q', '-y', '-c', str(config), *command],
    cwd=folder,
    env=os.environ | {'LC_ALL': 'C.UTF-8'},
    stdin=subprocess.DEVNULL,
    capture_output=True,
    text=True,
    errors='replace',
    check=False,
  )
  errors, warnings = (
    re.findall(rf'^{kind}: (.+)', done.stderr, re.MULTILINE) for kind in 'EW'
  )
  complaint = (errors or warnings or [''])[0].strip()
  if done.returncode:
    reason = complaint or f'status {done.returncode}'
    raise ValueError(f'apt-get {command[0]} failed: {reason}')
  return complaint


def read(folder: Path, packages: Sequence[str] = PACKAGES) -> Archive:
  """Finds and checks what `download` left, here or on another host.

  Args:
    folder: with `lists/` and `packages/`.
    packages: those that are needed.

  Raises:
    ValueError: if a file is missing, or its checksum is not the archive's.
  """
  lists = folder / 'lists'
  if not lists.is_dir():
    raise ValueError(
      f"{folder} has no folder 'lists' of apt's indices: is it what "
      '--keep_downloads left?'
    )
  german = _german_index(lists)
  base, _, release_path = german.name.partition('_dists_')
  suite = release_path.removesuffix('_main_i18n_Translation-de')
  release, sums = _read_release(lists, f'{base}_dists_{suite}')
  sha256 = {}
  translations = {}
  for language in LANGUAGES:
    path = german.with_name(german.name.removesuffix('de') + language)
    name = f'main/i18n/Translation-{language}'
    sha256[f'{suite}/{name}'] = _checked(path, sums.get(name))
    translations[language] = path
  binaries = _binary_index(lists, f'{base}_dists_{suite}_main')
  name = f'main/{binaries.name.rpartition("_main_")[2].replace("_", "/")}'
  sha256[f'{suite}/{name}'] = _checked(binaries, sums.get(name))
  source_packages, known = _read_packages(binaries, packages)
  for other in sorted(lists.glob('*_Packages')):
    if other != binaries:  # A newer version, from updates or from security.
      for package, versions in _read_packages(other, packages)[1].items():
        known[package] = known.get(package, {}) | versions
  debs, versions = {}, {}
  for package in packages:
    path = _deb(folder / 'packages', package)
    digest = _sha256(path)
    if digest not in known.get(package, {}):
      raise ValueError(
        f"{path} is not what the archive's index describes: the download is "
        'incomplete or damaged'
      )
    debs[package] = path
    versions[package] = known[package][digest]
    sha256[f'{package} {versions[package]}'] = digest
  return Archive(
    release=release,
    translations=translations,
    source_packages=source_packages,
    debs=debs,
    versions=versions,
    sha256=sha256,
  )


def _german_index(lists: Path) -> Path:
  """The release's Translation-de; updates and security have none."""
  found = _german_indices(lists)
  if len(found) == 1:
    return found[0]
  if found:
    raise ValueError(
      f'{lists} has indices of {len(found)} releases, '
      f'{", ".join(path.name for path in found)}: leave one'
    )
  raise ValueError(f'{lists} has no Translation-de: the download is incomplete')


def _german_indices(lists: Path) -> list[Path]:
  return sorted(lists.glob('*_dists_*_main_i18n_Translation-de'))


def _binary_index(lists: Path, prefix: str) -> Path:
  """The release's Packages of one architecture."""
  found = sorted(lists.glob(f'{prefix}_binary-*_Packages'))
  if not found:
    raise ValueError(
      f'{lists} has no {prefix}_binary-*_Packages: the download is incomplete'
    )
  return found[0]


def _deb(folder: Path, package: str) -> Path:
  """The file of a package."""
  found = sorted(folder.glob(f'{package}_*.deb'))
  if len(found) != 1:
    raise ValueError(
      f'{folder} has {len(found)} files {package}_*.deb, and one is needed'
    )
  return found[0]


def _read_release(
  lists: Path, prefix: str
) -> tuple[dict[str, str], dict[str, str]]:
  """Fields of a release file, and SHA-256 by path."""
  # Signed within, as archives have it, or apart.
  path = lists / f'{prefix}_InRelease'
  if not path.exists():
    path = lists / f'{prefix}_Release'
  if not path.exists():
    raise ValueError(
      f'{lists} has no {prefix}_InRelease: the download is incomplete'
    )
  text = path.read_text(encoding='utf-8', errors='replace')
  fields = {
    name.lower(): found[1]
    for name in ('Origin', 'Codename', 'Version', 'Date')
    if (found := re.search(rf'^{name}: (.+)$', text, re.MULTILINE))
  }
  if fields.get('origin') != 'Debian':
    raise ValueError(
      f'{path.name} is of {fields.get("origin", "nobody")}: the corpora are '
      "made from Debian's archive"
    )
  sums = text.partition('\nSHA256:\n')[2]
  return fields, {name: digest for digest, name in _SUM.findall(sums)}


def _read_packages(
  path: Path, packages: Sequence[str]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
  """Source packages, and versions by SHA-256 of some packages."""
  sources: dict[str, str] = {}
  known: dict[str, dict[str, str]] = {}
  fields = ('Package', 'Source', 'Version', 'SHA256')
  for stanza in descriptions.stanzas(_lines(path), fields):
    package = stanza.get('Package', [''])[0]
    if 'Source' in stanza:  # "name (version)" where the versions differ.
      sources[package] = stanza['Source'][0].split(' ')[0]
    if package in packages and 'SHA256' in stanza and 'Version' in stanza:
      versions = known.setdefault(package, {})
      versions[stanza['SHA256'][0]] = stanza['Version'][0]
  return sources, known


def _lines(path: Path) -> Iterator[str]:
  with path.open(encoding='utf-8', errors='replace', newline='\n') as file:
    yield from file


def _checked(path: Path, expected: str | None) -> str:
  """The file's SHA-256, which must be the release's."""
  if not path.exists():
    raise ValueError(f'{path} is missing: the download is incomplete')
  digest = _sha256(path)
  if digest != expected:
    raise ValueError(
      f'{path} has SHA-256 {digest[:12]}, the release says '
      f'{(expected or "nothing")[:12]}: the download is incomplete or damaged'
    )
  return digest


def _sha256(path: Path) -> str:
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()
