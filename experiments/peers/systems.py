"""Systems that decode the same prompts greedily with the same weights.

Each is made in a process of its own, with its own package: ours, transformers
(Wolf et al. 2020) and llama.cpp through llama-cpp-python.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import report
from specdec_jax.base import Prompt
from specdec_jax.files.require import require

# From the index of a prompt to its new tokens, EOS included.
Decode = Callable[[int], list[int]]

_package = functools.partial(require, extra='peers', purpose='the comparison')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What every system is given.

  Attributes:
    model: the target: a name of ours.
    draft_model: the drafter, or None for prompt lookup.
    folder: where the same weights lie for the other systems.
    texts: the prompts.
    is_chat: whether they are put into the model's chat template.
    num_new: new tokens per prompt, at most.
    gamma: drafted tokens per target run.
  """

  model: str
  draft_model: str | None
  folder: Path
  texts: Sequence[str]
  is_chat: bool
  num_new: int
  gamma: int

  @property
  def drafter(self) -> str:
    return 'model' if self.draft_model else 'prompt_lookup'


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
  """What one process runs.

  Attributes:
    version: of the package and what it stands on.
    ways: decodes by the drafter: 'none' and the task's.
    ids: prompts as token ids, where the system encoded them.
    eos_ids: ids that end a text.
  """

  version: str
  ways: Mapping[str, Decode]
  ids: Sequence[list[int]] = ()
  eos_ids: Sequence[int] = ()


def ours(task: Task, dtype: str) -> System:
  """This project: `specdec_jax.load`, and the loop as one compiled program."""
  import jax

  import specdec_jax
  from specdec_jax.assembly import packing, running

  settings = running.DecodeSettings(
    max_new_tokens=task.num_new, chat=task.is_chat
  )
  ways: dict[str, Decode] = {}
  for drafter in ('none', task.drafter):
    options: dict[str, Any] = {}
    if drafter != 'none':
      options['gamma'] = task.gamma
    if drafter == 'model':
      options['draft_model'] = task.draft_model
    decoder = specdec_jax.load(
      task.model, drafter=drafter, dtype=dtype, **options
    )
    batches = packing.pack(decoder, task.texts, settings)
    program = running.compile_decode(decoder, batches[0], settings)

    def decode(index: int, program=program, batches=batches) -> list[int]:
      output = jax.device_get(program(batches[index], ()))
      start = int(batches[index].prompt.decoder_lengths[0])
      return output.tokens[0, start : int(output.lengths[0])].tolist()

    ways[drafter] = decode
  return System(
    version=report.versions('specdec_jax', 'jax'),
    ways=ways,
    ids=[_prompt_ids(batch.prompt) for batch in batches],
    eos_ids=decoder.method.eos_id,
  )


def _prompt_ids(prompt: Prompt) -> list[int]:
  """The one row of a prompt, without padding."""
  if prompt.encoder_tokens is not None:
    return [id for id in prompt.encoder_tokens[0].tolist() if id]
  return prompt.decoder_tokens[0, : int(prompt.decoder_lengths[0])].tolist()


def transformers(
  task: Task, dtype: str, ids: Sequence[list[int]], eos_ids: Sequence[int]
) -> System:
  """Hugging Face transformers: `generate`, plain, with prompt lookup or with
  an assistant of a constant number of tokens."""
  torch, package = _package('torch'), _package('transformers')
  torch.set_num_threads(os.cpu_count())
  package.logging.set_verbosity_error()

  def load(folder: Path) -> Any:
    kind = package.AutoConfig.from_pretrained(folder)
    auto = (
      package.AutoModelForSeq2SeqLM
      if kind.is_encoder_decoder
      else package.AutoModelForCausalLM
    )
    return auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

  model = load(task.folder / 'target')
  if task.draft_model:
    assistant = load(task.folder / 'drafter')
    assistant.generation_config.num_assistant_tokens = task.gamma
    assistant.generation_config.num_assistant_tokens_schedule = 'constant'
    # Otherwise it stops a draft that it is unsure of.
    assistant.generation_config.assistant_confidence_threshold = 0.0
    drafting = {'assistant_model': assistant}
  else:
    drafting = {'prompt_lookup_num_tokens': task.gamma}
  is_encoder_decoder = model.config.is_encoder_decoder

  def decode(index: int, **options: Any) -> list[int]:
    prompt = torch.tensor([ids[index]])
    with torch.inference_mode():
      output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=task.num_new,
        eos_token_id=list(eos_ids),
        pad_token_id=0,
        **options,
      )
    # Decoders of encoder-decoders begin with a start token.
    start = 1 if is_encoder_decoder else prompt.shape[1]
    return output[0, start:].tolist()

  return System(
    version=report.versions('transformers', 'torch'),
    ways={
      'none': decode,
      task.drafter: lambda index: decode(index, **drafting),
    },
  )


def llama_cpp(
  task: Task, file: str, ids: Sequence[list[int]], eos_ids: Sequence[int]
) -> System:
  """llama.cpp through llama-cpp-python, plain and with its prompt lookup.

  Args:
    task: without a draft model.
    file: a .gguf file of the task's folder.
    ids: the prompts.
    eos_ids: ids that end a text.
  """
  package = _package('llama_cpp')
  lookup = _package('llama_cpp.llama_speculative')
  longest = max(len(row) for row in ids)
  options = {
    'model_path': str(task.folder / file),
    'n_ctx': longest + task.num_new + task.gamma + 1,
    'n_threads': os.cpu_count(),
    'n_threads_batch': os.cpu_count(),
    'verbose': False,
  }
  plain = package.Llama(**options)
  speculative = package.Llama(
    **options,
    draft_model=lookup.LlamaPromptLookupDecoding(num_pred_tokens=task.gamma),
  )

  def decode(model: Any, index: int) -> list[int]:
    model.reset()
    tokens: list[int] = []
    for token in model.generate(ids[index], temp=0.0, repeat_penalty=1.0):
      tokens.append(token)
      if token in eos_ids or len(tokens) == task.num_new:
        break
    return tokens

  return System(
    version=report.versions('llama-cpp-python'),
    ways={
      'none': lambda index: decode(plain, index),
      task.drafter: lambda index: decode(speculative, index),
    },
  )
