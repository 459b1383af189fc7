"""The self-test of `exact_bits`, before what is measured."""

import pytest

from tests.decoding.test_exact_bits import assert_refused  # noqa: F401


@pytest.mark.slow
def test_the_self_test_comes_before_times(assert_refused):  # noqa: F811
  flags = ('--model', 'lm-nano', '--gamma', '3', '--prompt', 'a')
  assert_refused('bench', *flags, '--exact_bits')
