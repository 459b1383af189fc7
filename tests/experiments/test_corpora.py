"""`python -m experiments.corpora`, on a miniature of the archive."""

import json
import re
import shutil

import pytest

from experiments.corpora import (
  __main__,
  archive,
  cleaning,
  debian,
  documents,
  splitting,
)
from tests.experiments import miniature_archive

pytest.importorskip('rich')

CORPORA = debian.DEFAULT


@pytest.fixture(scope='module')
def repository(tmp_path_factory):
  root = tmp_path_factory.mktemp('archive') / 'debian'
  miniature_archive.write_repository(root)
  return root


@pytest.fixture
def downloads(repository, tmp_path):
  miniature_archive.write_downloads(repository, tmp_path / 'downloads')
  return tmp_path / 'downloads'


@pytest.fixture(scope='module')
def built(repository, tmp_path_factory):
  root = tmp_path_factory.mktemp('built')
  miniature_archive.write_downloads(repository, root / 'downloads')
  assert build(root / 'downloads', root / 'out') == 0
  return root / 'out'


def build(downloads, out, *options):
  return __main__.main(
    ['debian', '--from_dir', str(downloads), '--out', str(out), *options]
  )


def read(folder, corpus, split):
  lines = (folder / corpus / f'{split}.jsonl').read_text(encoding='utf-8')
  return [json.loads(line) for line in lines.splitlines()]


def files(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


def test_twice_gives_the_same_bytes(built, downloads, tmp_path):
  assert build(downloads, tmp_path / 'out') == 0
  assert files(tmp_path / 'out') == files(built)
  assert len(files(built)) == 10


def test_no_group_is_in_two_splits(built):
  groups = {
    split: {e['group'] for name in CORPORA for e in read(built, name, split)}
    for split in splitting.SPLITS
  }
  assert all(groups.values())
  assert not groups['train'] & groups['validation']
  assert not groups['train'] & groups['test']
  assert not groups['validation'] & groups['test']
  # Two versions of a source package are one group.
  names = set().union(*groups.values())
  sources = {miniature_archive.word(i) for i in range(300)}
  assert sources <= names
  assert not any(re.search(r'-1[12]$', name) for name in names)


@pytest.mark.parametrize('corpus', CORPORA)
def test_nothing_is_repeated_or_shared(built, corpus):
  key = 'text' if corpus == 'debian_lm' else 'inputs'
  seen = set()
  for split in splitting.SPLITS:
    examples = read(built, corpus, split)
    texts = [e[key] for e in examples]
    assert not seen & set(texts)
    seen.update(texts)
    fields = [tuple(v for k, v in e.items() if k != 'group') for e in examples]
    assert len(fields) == len(set(fields))
  if corpus == 'debian_ende':
    assert miniature_archive.SHARED[0] in seen


def test_pairs_are_what_they_should_be(built):
  pairs = {
    (e['inputs'], e['targets'])
    for split in splitting.SPLITS
    for e in read(built, 'debian_ende', split)
  }
  own = miniature_archive.word(7)
  assert pairs >= {
    ('File', 'Datei'),
    ('Black & White', 'Schwarz & Weiß'),
    ('Use FILTER_NAME here', 'Hier FILTER_NAME verwenden'),
    ('LibreOffice document', 'LibreOffice-Dokument'),
    ('one page', 'eine Seite'),
    ('%1 pages', '%1 Seiten'),
    (
      f'tool {own} for the measurement of time',
      f'Werkzeug {own} für das Messen von Zeit',
    ),
    (
      'It was written by the people who use it.',
      'Es wurde von den Leuten geschrieben, die es verwenden.',
    ),
    miniature_archive.SHARED,
    (
      f'Choose {miniature_archive.word(907)} and press the key Ctrl .',
      f'Wählen Sie {miniature_archive.word(907)} und drücken Sie Strg .',
    ),
  }
  english = {source for source, _ in pairs}
  # Placeholders differ; markup; the same on both sides; no element with an id.
  assert not english & {'Page %1 of %2', 'Bold', 'Calc', 'Horizontal:'}
  assert not any('Navigation' in text or 'skipped' in text for text in english)


def test_summaries_and_plain_text(built):
  own = miniature_archive.word(0)
  everything = [
    e
    for split in splitting.SPLITS
    for e in read(built, 'debian_synopsis', split)
  ]
  (example,) = (e for e in everything if f'{own}11-data' in e['inputs'])
  assert example['targets'] == f'tool {own} for the measurement of time'
  assert example['inputs'].endswith(f'use it. {miniature_archive.SHARED[0]}')
  texts = [
    e['text']
    for split in splitting.SPLITS
    for e in read(built, 'debian_lm', split)
  ]
  # A paragraph that many packages share is kept once.
  assert sum(miniature_archive.SHARED[0] in text for text in texts) == 1


def test_the_manifest_says_what_there_is(built):
  manifest = json.loads((built / 'manifest.json').read_text())
  assert manifest['archive']['release']['codename'] == 'miniature'
  assert manifest['archive']['packages'] == dict.fromkeys(archive.PACKAGES, '1')
  for corpus in CORPORA:
    figures = manifest['corpora'][corpus]
    kept = sum(split['examples'] for split in figures['splits'].values())
    removed = sum(figures['removed'].values())
    assert kept + removed == sum(figures['candidates'].values())


def damage_index(folder):
  (path,) = (folder / 'lists').glob('*Translation-de')
  path.write_bytes(path.read_bytes()[:-100])


def damage_package(folder):
  path = folder / 'packages' / 'libreoffice-help-de_1_all.deb'
  path.write_bytes(path.read_bytes()[:-100])


def remove(pattern):
  def damage(folder):
    for path in folder.rglob(pattern):
      path.unlink()

  return damage


def of_another(folder):
  (path,) = (folder / 'lists').glob('*_Release')
  path.write_text(path.read_text().replace('Origin: Debian', 'Origin: Other'))


@pytest.mark.parametrize(
  ('damage', 'reason'),
  [
    (damage_index, 'Translation-de has SHA-256 .* incomplete or damaged'),
    (damage_package, 'libreoffice-help-de_1_all.deb is not what'),
    (remove('*_Release'), 'InRelease: the download is incomplete'),
    (remove('*Translation-de'), 'has no .*Translation-de'),
    (remove('*Translation-en'), 'Translation-en is missing'),
    (remove('*_Packages'), 'Packages: the download is incomplete'),
    (remove('*l10n*'), r'has no libreoffice-l10n-de_\*.deb'),
    (of_another, "is of Other: the corpora are made from Debian's archive"),
    (lambda folder: shutil.rmtree(folder / 'lists'), "no folder 'lists'"),
  ],
)
def test_damaged_downloads(downloads, tmp_path, capfd, damage, reason):
  damage(downloads)
  assert build(downloads, tmp_path / 'out') == 2
  (complaint,) = capfd.readouterr().err.splitlines()
  assert re.search(reason, complaint)
  assert [path.name for path in tmp_path.iterdir()] == ['downloads']


def test_one_corpus_needs_no_packages(downloads, tmp_path):
  shutil.rmtree(downloads / 'packages')
  assert build(downloads, tmp_path / 'out', '--only', 'debian_lm') == 0
  assert not (tmp_path / 'out' / 'debian_ende').exists()


def test_an_earlier_build_is_replaced_only_on_demand(
  downloads, tmp_path, capfd
):
  out = tmp_path / 'out'
  only = ('--only', 'debian_lm')
  assert build(downloads, out, *only) == 0
  before = files(out)
  assert build(downloads, out, *only) == 2
  assert 'add --overwrite' in capfd.readouterr().err
  damage_index(downloads)
  assert build(downloads, out, *only, '--overwrite') == 2
  assert files(out) == before
  (out / 'manifest.json').unlink()
  assert build(downloads, out, *only, '--overwrite') == 2
  assert 'holds something else' in capfd.readouterr().err


def test_a_full_disk(downloads, tmp_path, capfd):
  resource = pytest.importorskip('resource')
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    status = build(downloads, tmp_path / 'out', '--only', 'debian_lm')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert status == 2
  assert re.search(
    'cannot write .*out: File too large',
    capfd.readouterr().err,
  )
  assert [path.name for path in tmp_path.iterdir()] == ['downloads']


def test_a_host_without_apt(tmp_path, monkeypatch, capfd):
  monkeypatch.setenv('PATH', str(tmp_path))
  out = str(tmp_path / 'out')
  assert __main__.main(['debian', '--out', out]) == 2
  assert '--from_dir FOLDER' in capfd.readouterr().err


@pytest.mark.skipif(not shutil.which('apt-get'), reason='needs apt')
def test_apt_downloads_what_is_read(repository, built, tmp_path, monkeypatch):
  _configure_apt(tmp_path, monkeypatch, repository)
  command = ['debian', '--out', str(tmp_path / 'out')]
  kept = tmp_path / 'kept'
  assert __main__.main([*command, '--keep_downloads', str(kept)]) == 0
  assert files(tmp_path / 'out') == files(built)
  assert sorted(path.name for path in kept.iterdir()) == ['lists', 'packages']


@pytest.mark.skipif(not shutil.which('apt-get'), reason='needs apt')
@pytest.mark.parametrize(
  ('place', 'reason'),
  [
    ('/missing', 'apt-get update failed: .*missing'),
    (None, 'brought no German index .*: the sources of this host have none'),
  ],
)
def test_apt_without_an_archive(tmp_path, monkeypatch, capfd, place, reason):
  _configure_apt(tmp_path, monkeypatch, place)
  out = str(tmp_path / 'out')
  assert __main__.main(['debian', '--out', out]) == 2
  (complaint,) = capfd.readouterr().err.splitlines()
  assert re.search(reason, complaint)
  assert not (tmp_path / 'out').exists()


def _configure_apt(folder, monkeypatch, repository):
  """Gives the host one source of packages, or none."""
  sources, config = folder / 'sources.list', folder / 'host.conf'
  line = f'deb [trusted=yes arch=amd64] copy:{repository} miniature main\n'
  sources.write_text(line if repository else '')
  config.write_text(
    f'Dir::Etc::SourceList "{sources}";\nDir::Etc::SourceParts "/dev/null";\n'
    'Dir::State::status "/dev/null";\nAPT::Architecture "amd64";\n'
  )
  monkeypatch.setenv('APT_CONFIG', str(config))


def test_splits_have_their_sizes():
  names = [miniature_archive.word(i) for i in range(10_000)]
  counts = dict.fromkeys(splitting.SPLITS, 0)
  for name in names:
    counts[splitting.split_of(name)] += 1
  assert 9_500 < counts['train'] < 9_700
  assert 150 < counts['validation'] < 250
  assert 150 < counts['test'] < 250


def test_normal_form():
  decomposed = 'Schlu\N{COMBINING DIAERESIS}ssel\xa0\t\N{SOFT HYPHEN}bund\x07'
  assert cleaning.normalise(decomposed) == 'Schlüssel bund'


@pytest.mark.parametrize(
  ('english', 'german', 'reason'),
  [
    ('Save the file', 'Speichert die Datei', None),
    ('Save the file', 'Save the file', 'identical'),
    ('Save %1', 'Speichert %2', 'placeholders'),
    ('Save', 'Speichert die Datei und dann alles andere', 'length_ratio'),
    ('12', '13', 'empty'),
    (
      'Saves the files of the user and is free',
      'Saves the files of the user and is good',
      'language',
    ),
  ],
)
def test_obstacles(english, german, reason):
  assert cleaning.obstacle(english, german) == reason


def test_sentences_are_paired_only_if_they_agree():
  english = 'It is, e.g. The Tool. It runs.'
  german = 'Es ist z. B. Das Werkzeug. Es läuft.'
  assert cleaning.aligned_sentences(english, german) == [
    ('It is, e.g. The Tool.', 'Es ist z. B. Das Werkzeug.'),
    ('It runs.', 'Es läuft.'),
  ]
  assert len(cleaning.aligned_sentences(english, 'Es läuft.')) == 1


def test_paragraphs_of_manuals_are_english_sentences():
  page = """<head><title>No text.</title></head><body><h1>No text</h1>
    <p>The <code>open</code> call reads a file. It may fail.<pre>x = 1</pre>
    <div>No text</div><ul><li>An entry of a list</ul>
    <table><tr><td><p>No text either</td></tr></table><p>Das ist die Datei."""
  found = [cleaning.normalise(x) for x in documents.paragraphs(page)]
  assert found == [
    'The open call reads a file. It may fail.',
    'An entry of a list',
    'Das ist die Datei.',
  ]
  first, _ = cleaning.sentences(found[0])
  assert cleaning.is_english(first, 3, 60)
  for text in (
    'Only two',
    'f(x) = {y: [1, 2, 3]} for all of it',
    'Das ist die Datei, die von dem Programm gelesen wird',
  ):
    assert not cleaning.is_english(text, 3, 60)
  assert not cleaning.is_english(first, 3, 5)
