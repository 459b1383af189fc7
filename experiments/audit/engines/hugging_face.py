"""Hugging Face transformers: `generate` plain, with an assistant, and with
prompt lookup, on a Llama with random weights."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.audit import ways
from experiments.audit.ways import Tokens, Way


def engine() -> Iterator[Way]:
  """Its ways; speculation takes one row at a time."""
  torch, transformers = ways.package('torch'), ways.package('transformers')
  transformers.logging.set_verbosity_error()
  torch.set_num_threads(1)
  model, assistant = models(torch, transformers)

  @torch.inference_mode()
  def generate(prompt: Tokens, num: int = 1, **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    output = model.generate(
      ids,
      attention_mask=torch.ones_like(ids),
      max_new_tokens=ways.NUM_TOKENS,
      num_return_sequences=num,
      **options,
    )
    return output[:, len(prompt) :].tolist()

  def plain(prompt: Tokens, num: int, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return generate(prompt, num, do_sample=True, **options)

  def one_by_one(prompt: Tokens, num: int, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    return [generate(prompt, do_sample=True, **options)[0] for _ in range(num)]

  @functools.cache
  def logits(prefix: Tokens) -> np.ndarray:
    with torch.inference_mode():
      return model(torch.tensor([prefix])).logits[0, -1].double().numpy()

  for drafter, drafting in {
    'plain': {},
    'assistant': {'assistant_model': assistant},
    'prompt lookup': {'prompt_lookup_num_tokens': ways.GAMMA},
  }.items():
    for setting, top_k in ways.SETTINGS.items():
      yield Way(
        f'{drafter}, {setting}, batch {"all" if drafter == "plain" else 1}',
        functools.partial(
          one_by_one if drafting else plain,
          # 0 keeps all, and None the default, 50.
          top_k=top_k or 0,
          **drafting,
        ),
        lambda prefix, top_k=top_k: ways.probs_of(logits(prefix), top_k),
        ways.ONE if drafting else ways.FOUR,
        8000 if drafting else 50_000,
        functools.partial(_greedy, generate, drafting),
      )


def models(torch: Any, transformers: Any) -> tuple[Any, Any]:
  """A target, and an assistant whose weights are near the target's."""
  config = transformers.LlamaConfig(
    vocab_size=ways.VOCAB_SIZE,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    initializer_range=0.4,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
  )
  torch.manual_seed(1)
  model, assistant = (
    transformers.LlamaForCausalLM(config).eval() for _ in range(2)
  )
  with torch.no_grad():
    pairs = zip(assistant.parameters(), model.parameters(), strict=True)
    for own, other in pairs:
      own.copy_(0.8 * other + 0.4 * own)
  settings = assistant.generation_config
  settings.num_assistant_tokens = ways.GAMMA
  settings.num_assistant_tokens_schedule = 'constant'
  # Otherwise it stops a draft that it is unsure of.
  settings.assistant_confidence_threshold = 0.0
  return model, assistant


def _greedy(generate: Any, drafting: dict, prompt: Tokens) -> list[int]:
  return generate(prompt, do_sample=False, **drafting)[0]
