"""Makes the golden files of Hugging Face transformers; never edit them by hand.

Needs an environment of its own: transformers is no dependency of the package.

  pip install torch==2.13.0 transformers==5.23.0 gguf tokenizers safetensors \\
      accelerate sentencepiece
  python tests/golden/make_huggingface.py \\
      --gguf SmolLM2-135M-Instruct.Q4_1.gguf [--output tests/golden]

Writes

- `smollm2_greedy.json`: greedy continuations in float32, prompts included, and
  at every generated position by how much the first logit led the second;
- random two-layer models as `save_pretrained` writes them, with token ids and
  logits in `golden.npz`: `tiny_llama/`, `tiny_llama_untied/`, `tiny_qwen2/`;
  `tiny_llama_3_1/`, whose rotary positions are scaled; `tiny_mistral/`, with a
  window; `tiny_qwen2_window/`, with one in its second layer; `tiny_qwen3/`;

and prints how fast transformers decodes greedily on this machine.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import tokenizers
import torch
import transformers

NUM_NEW_TOKENS = 48

CHATS = (
  'What is the capital of France, and what river runs through it?',
  'Write a Python function that returns the n-th Fibonacci number.',
  'List five fruits that are red, one on each line.',
  'Repeat this sentence exactly: The quick brown fox jumps over the lazy dog.',
  'Translate "good morning, my friend" into Spanish.',
  'Explain to a child why the sky is blue.',
  'Fix the spelling: "I beleive teh meeting is on Wensday at 10:30."',
  'Copy this table:\n| name | age |\n| --- | --- |\n| Ann | 31 |\n| Bob | 27 |',
  'What is 17 + 25? Show your steps.',
  "Écris une phrase sur l'été à Zürich. ☀️",
  '日本の首都はどこですか？',
  'Write a haiku about snow.',
  'Give me a JSON object with the keys "id", "name" and "tags".',
  'Summarise: Speculative decoding drafts several tokens with a small model '
  'and verifies them with a large one in a single pass.',
)
PLAINS = (
  'The capital of France is',
  'Once upon a time, in a village by the sea,',
  'def quicksort(items):\n  if len(items) <= 1:\n    return items\n',
  '1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,',
  'A A B A A B A A B A A',
  '#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i  <  100; i++)',
  'The three laws of thermodynamics are:\n\n1.',
  'Monday, Tuesday, Wednesday,',
  'naïve café — “quoted” … 3½ cups, 10 €, and 🙂🙂',
  'SELECT name, COUNT(*) FROM orders\nWHERE year =   2021\nGROUP BY',
  '    indented\n\n\n\twith tabs and   7  spaces',
  'Water boils at 100 degrees Celsius. Ice melts at',
)


def load_smollm2(path: pathlib.Path):
  """The model, dequantised to float32, and its tokenizer."""
  folder, name = str(path.parent), path.name
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
  # The conversion from GGUF forgets that SmolLM2 splits digits off first, so
  # "  1" would become two spaces in place of SmolLM2's one double space.
  pre = tokenizers.pre_tokenizers
  tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
    [
      pre.Digits(individual_digits=True),
      pre.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.float32, attn_implementation='eager'
  )
  return model.eval(), tokenizer


def greedy(model, ids: list[int], num_new_tokens: int, *, eos_id):
  return model.generate(
    torch.tensor([ids]),
    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    max_new_tokens=num_new_tokens,
    do_sample=False,
    eos_token_id=eos_id,
    pad_token_id=0,
    output_logits=True,
    return_dict_in_generate=True,
  )


def decode_prompts(model, tokenizer) -> list[dict]:
  """Every prompt with its greedy continuation."""
  records = []
  kinds = [('chat', t) for t in CHATS] + [('plain', t) for t in PLAINS]
  for kind, text in kinds:
    rendered = text
    if kind == 'chat':
      rendered = tokenizer.apply_chat_template(
        [{'role': 'user', 'content': text}],
        tokenize=False,
        add_generation_prompt=True,
      )
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    result = greedy(model, ids, NUM_NEW_TOKENS, eos_id=tokenizer.eos_token_id)
    output_ids = result.sequences[0, len(ids) :].tolist()
    top = torch.stack(result.logits)[:, 0].topk(2).values
    records.append(
      {
        'kind': kind,
        'text': text,
        'rendered': rendered,
        'prompt_ids': ids,
        'output_ids': output_ids,
        'output_text': tokenizer.decode(output_ids),
        'margins': [round(m, 5) for m in (top[:, 0] - top[:, 1]).tolist()],
      }
    )
    print(f'{kind:5} {min(records[-1]["margins"]):.5f} {text[:50]!r}')
  return records


def write_golden(path: pathlib.Path, golden: dict) -> None:
  """Writes JSON with one record a line."""
  records = ',\n'.join(
    json.dumps(record, ensure_ascii=False) for record in golden['records']
  )
  head = json.dumps({k: v for k, v in golden.items() if k != 'records'})
  path.write_text(
    f'{head[:-1]}, "records": [\n{records}\n]}}\n', encoding='utf-8'
  )


def time_greedy(model, tokenizer, num_tokens: int = 96) -> None:
  """Prints tokens a second of a greedy decode, the best of three."""
  ids = tokenizer.encode('Once upon a time, in a village by the sea,')
  for dtype in (torch.float32, torch.bfloat16):
    for attention in ('eager', 'sdpa'):
      model.to(dtype).set_attn_implementation(attention)
      seconds = []
      for _ in range(4):
        start = time.perf_counter()
        result = greedy(model, ids, num_tokens, eos_id=None)
        seconds.append(time.perf_counter() - start)
        assert result.sequences.shape[1] == len(ids) + num_tokens
      print(
        f'{dtype} {attention}: {num_tokens / min(seconds[1:]):.1f} tokens/s '
        f'({torch.get_num_threads()} threads)'
      )


def make_tiny(folder: pathlib.Path, model, seed: int) -> None:
  """Saves a random model, some token ids and its logits for them."""
  torch.manual_seed(seed)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if 'norm' in name:
        parameter.uniform_(0.5, 1.5)
      else:
        parameter.normal_(std=0.2)
    ids = torch.randint(0, 64, (3, 24))
    logits = model.eval().to(torch.float32)(ids).logits
  model.save_pretrained(folder)
  (folder / 'generation_config.json').unlink()
  np.savez(folder / 'golden.npz', ids=ids.numpy(), logits=logits.numpy())


def make_tiny_models(output: pathlib.Path) -> None:
  sizes = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 128,
    'rms_norm_eps': 1e-5,
    'bos_token_id': 1,
    'eos_token_id': 2,
  }
  tied = transformers.LlamaConfig(
    **sizes, rope_theta=10_000.0, tie_word_embeddings=True
  )
  untied = transformers.LlamaConfig(
    **sizes, rope_theta=100_000.0, tie_word_embeddings=False
  )
  biased = transformers.Qwen2Config(
    **sizes, rope_theta=1e6, tie_word_embeddings=True
  )
  scaled = transformers.LlamaConfig(
    **sizes,
    tie_word_embeddings=True,
    rope_parameters={
      'rope_type': 'llama3',
      'rope_theta': 100.0,
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 32,
    },
  )
  window = transformers.MistralConfig(
    **sizes, sliding_window=7, tie_word_embeddings=False
  )
  second = transformers.Qwen2Config(
    **sizes,
    use_sliding_window=True,
    sliding_window=5,
    max_window_layers=1,
    tie_word_embeddings=True,
  )
  normed = transformers.Qwen3Config(
    **sizes, head_dim=12, rope_theta=1e6, tie_word_embeddings=False
  )
  llama, qwen2 = transformers.LlamaForCausalLM, transformers.Qwen2ForCausalLM
  models = {
    'tiny_llama': (llama, tied),
    'tiny_llama_untied': (llama, untied),
    'tiny_qwen2': (qwen2, biased),
    'tiny_llama_3_1': (llama, scaled),
    'tiny_mistral': (transformers.MistralForCausalLM, window),
    'tiny_qwen2_window': (qwen2, second),
    'tiny_qwen3': (transformers.Qwen3ForCausalLM, normed),
  }
  for seed, (name, (model, config)) in enumerate(models.items(), start=1):
    make_tiny(output / name, model(config), seed)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--gguf', type=pathlib.Path, help='without it, only the tiny models'
  )
  parser.add_argument('--only_time', action='store_true')
  parser.add_argument(
    '--output', type=pathlib.Path, default=pathlib.Path('tests/golden')
  )
  parser.add_argument('--threads', type=int, default=2)
  arguments = parser.parse_args()
  torch.set_num_threads(arguments.threads)
  if not arguments.only_time:
    make_tiny_models(arguments.output)
  if arguments.gguf is None:
    return
  model, tokenizer = load_smollm2(arguments.gguf)
  if arguments.only_time:
    time_greedy(model, tokenizer)
    return
  golden = {
    'model': arguments.gguf.name,
    'transformers': transformers.__version__,
    'torch': torch.__version__,
    'eos_id': tokenizer.eos_token_id,
    'records': decode_prompts(model, tokenizer),
  }
  write_golden(arguments.output / 'smollm2_greedy.json', golden)
  time_greedy(model, tokenizer)


if __name__ == '__main__':
  main()
