"""Exact, tested like everything else, and not worth its place yet.

What lies here keeps the target's output as the rest of the package does, has
the same tests and can be chosen at the same doors, but was not faster than
plainer ways on any model that it was measured with. It moves up once it is; its
interface may change without notice.

- `speculative_beams`, `beam_trie`, `beams`: beam search that scores several
  steps of all beams in one target call, and its drafters. With no draft it is
  the search that `specdec infer` runs, since beams then share one cache.
- `blockwise_heads`: the heads of Stern et al. (2018), which guess the next
  block from the target's last hidden state.
"""
