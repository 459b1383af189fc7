"""Corpora in a folder: a JSONL file per split, and a manifest."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.corpora import cleaning
from experiments.corpora.archive import Archive
from experiments.corpora.debian import Corpus

MANIFEST = 'manifest.json'
_FORMAT = 1


def write_corpus(folder: Path, name: str, corpus: Corpus) -> dict[str, Any]:
  """Writes `{name}/{split}.jsonl`; what the manifest says of them."""
  (folder / name).mkdir()
  splits = {}
  for split, examples in corpus.splits.items():
    content = ''.join(
      json.dumps(example, ensure_ascii=False) + '\n' for example in examples
    ).encode('utf-8')
    (folder / name / f'{split}.jsonl').write_bytes(content)
    fields = (
      [field for field in examples[0] if field != 'group'] if (examples) else []
    )
    splits[split] = {
      'examples': len(examples),
      'groups': len({example['group'] for example in examples}),
      'words': {
        field: sum(cleaning.num_words(example[field]) for example in examples)
        for field in fields
      },
      'sha256': hashlib.sha256(content).hexdigest(),
    }
  return {'splits': splits, **corpus.counts}


def write_manifest(
  folder: Path, files: Archive, corpora: Mapping[str, Any]
) -> dict[str, Any]:
  """Writes and returns the manifest: where all came from, and what it is."""
  manifest = {
    'format': _FORMAT,
    'archive': {
      'release': dict(files.release),
      'packages': dict(files.versions),
      'sha256': dict(sorted(files.sha256.items())),
    },
    'corpora': dict(corpora),
  }
  text = json.dumps(manifest, indent=2, ensure_ascii=False) + '\n'
  (folder / MANIFEST).write_text(text, encoding='utf-8')
  return manifest
