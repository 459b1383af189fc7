"""The small model of `tiny_api`, and what it decodes, for several files."""

import jax
import jax.numpy as jnp
import pytest

import specdec_jax
from tests.assembly import tiny_api


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> str:
  # Needs packages that the files whose tests use it skip without.
  from tests.cli import tiny

  return tiny.write_model(tmp_path_factory.mktemp('api') / 'tiny')


@pytest.fixture(scope='module')
def decoder(folder):
  return specdec_jax.load(folder, drafter='prompt_lookup', gamma=2)


@pytest.fixture(scope='module')
def completions(decoder):
  return tiny_api.generate(decoder, tiny_api.TEXTS)


@pytest.fixture(scope='module')
def compiled_events():
  """What jax says while it traces, lowers and compiles: the names so far."""
  events = []

  def listen(event: str, seconds: float, **_):
    if event.startswith('/jax/core/compile/'):
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  jax.jit(lambda x: x + 1)(jnp.zeros(3))
  assert len(events) >= 3
  yield events
  jax.monitoring.clear_event_listeners()
