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
from collections.abc import Mapping, Sequence
from pathlib import Path

from debian import deb822

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
_GERMAN = '*_dists_*_main_i18n_Translation-de'


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
    """Returns the source package of a package, without version numbers.

    `gcc-11` and `gcc-12` say nearly the same, and must share a split.
    """
    source = self.source_packages.get(package, package)
    return _VERSION_NUMBER.sub('', source) or source


def download(folder: Path, packages: Sequence[str] = PACKAGES) -> None:
  """Has apt fetch indices and packages, if any, into a folder.

  The host's own sources are used; its state is not touched. ValueError if the
  host has no apt, or apt fails, with apt's reason.
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
  if not list((folder / 'lists').glob(_GERMAN)):
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
  """Runs apt-get there and returns its first complaint, or ''; ValueError with
  that complaint if it fails."""
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

  `folder` has `lists/` and `packages/`, of which those of `packages` are
  needed. ValueError if a file is missing, or its checksum is not the archive's.
  """
  lists = folder / 'lists'
  if not lists.is_dir():
    raise ValueError(
      f"{folder} has no folder 'lists' of apt's indices: is it what "
      '--keep_downloads left?'
    )
  # Updates and security have none in German: one index is that of the release.
  german = _one(lists, _GERMAN)
  prefix = german.name.removesuffix('_main_i18n_Translation-de')
  suite = prefix.rpartition('_dists_')[2]
  release = _read_release(lists, prefix)
  # Where a host has several architectures, any will do.
  binaries = _found(lists, f'{prefix}_main_binary-*_Packages')[0]
  translations = {
    language: german.with_name(f'{prefix}_main_i18n_Translation-{language}')
    for language in LANGUAGES
  }
  sums = {each['name']: each['sha256'] for each in release.get('SHA256', ())}
  sha256 = {}
  for path in (*translations.values(), binaries):
    # Apt has `_` for `/`: bookworm_main_i18n_Translation-de.
    name = path.name.removeprefix(f'{prefix}_').replace('_', '/')
    sha256[f'{suite}/{name}'] = _checked(path, sums.get(name))
  debs, versions = {}, {}
  source_packages, known = _read_packages(lists, binaries, packages)
  for package in packages:
    path = _one(folder / 'packages', f'{package}_*.deb')
    digest = _sha256(path)
    if (package, digest) not in known:
      raise ValueError(
        f"{path} is not what the archive's index describes: the download is "
        'incomplete or damaged'
      )
    debs[package] = path
    versions[package] = known[package, digest]
    sha256[f'{package} {versions[package]}'] = digest
  names = 'Origin', 'Codename', 'Version', 'Date'
  return Archive(
    release={name.lower(): release[name] for name in names if name in release},
    translations=translations,
    source_packages=source_packages,
    debs=debs,
    versions=versions,
    sha256=sha256,
  )


def _found(folder: Path, pattern: str) -> list[Path]:
  """Finds files of a folder; ValueError if there is none."""
  if found := sorted(folder.glob(pattern)):
    return found
  raise ValueError(f'{folder} has no {pattern}: the download is incomplete')


def _one(folder: Path, pattern: str) -> Path:
  """Finds the one such file of a folder; ValueError if there are more, or
  none."""
  found = _found(folder, pattern)
  if len(found) == 1:
    return found[0]
  raise ValueError(
    f'{folder} has {len(found)} files {pattern}, '
    f'{", ".join(path.name for path in found)}: leave one'
  )


def _read_release(lists: Path, prefix: str) -> deb822.Release:
  """Reads a release file; it is signed within, as archives have it, or
  apart."""
  path = lists / f'{prefix}_InRelease'
  if not path.exists():
    path = lists / f'{prefix}_Release'
  if not path.exists():
    raise ValueError(
      f'{lists} has no {prefix}_InRelease: the download is incomplete'
    )
  release = deb822.Release(path.read_bytes())
  if (origin := release.get('Origin')) != 'Debian':
    raise ValueError(
      f"{path.name} is of {origin}: the corpora are made from Debian's archive"
    )
  return release


def _read_packages(
  lists: Path, binaries: Path, packages: Sequence[str]
) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
  """Reads source packages of the release, where the names differ, and versions
  of some packages by package and SHA-256."""
  sources: dict[str, str] = {}
  known: dict[tuple[str, str], str] = {}
  fields = 'Package', 'Source', 'Version', 'SHA256'
  # The others have newer versions, from updates or from security.
  for path in _found(lists, '*_Packages'):
    for stanza in descriptions.stanzas(path, fields):
      package = stanza['Package']
      if path == binaries and 'Source' in stanza:
        sources[package] = stanza.source
      if package in packages:
        known[package, stanza['SHA256']] = stanza['Version']
  return sources, known


def _checked(path: Path, expected: str | None) -> str:
  """Returns the file's SHA-256, which must be the release's."""
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
