"""A record of what the package does, to compare before and after code moves.

  python -m tests.recorded --out before.json
  python -m tests.recorded --compare before.json

The record has three sections:

- `outputs`: tokens, log-probabilities and statistics of each row of small
  models, through every door: flags, gin files, Python and T5X's `decode_fn`,
  with every drafter, rule, tree and change of the logits;
- `programs`: the StableHLO of six decoding loops;
- `names`: flags of all commands, names in gin files, keys of JSON, and the
  parameters of the Python functions.

The package is reached by what its users call: commands, gin files, checkpoints
on disk, `specdec_jax.load` and its companions. Models and cases are stated
here, and nothing is imported from other tests, so that a record can be compared
although files were moved. Records of another processor, JAX or Python are
refused, as their bits may differ.
"""
