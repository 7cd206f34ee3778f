"""
How long training, tuning and reading take, beside transformers' Llama of the same sizes and beside
the arithmetic that they need.

$ python -m extras.bench                                    # on a CPU many minutes: every piece
$ python -m extras.bench --tasks="['entropy']" --rounds=9 --name=entropy   # one piece
$ python -m extras.bench --peer=                            # without transformers

Machines are noisy, so what is compared takes turns: in each round each function runs once. A table
has for each function

  seconds      the median time of a call
  ratio        its time divided by that of the first function in the same round: the median, and in
               `from` and `to` the range over the rounds
  by flop      the same ratio if time were only arithmetic
  of limit     its arithmetic per second, as a share of that of a large matrix product in the same
               precision, which takes its turn in each round, too
  peak memory  most bytes of tensors that a call held, without those held before

Writes out_dir/NAME.json
"""

import itertools
import os
import time
from functools import partial
from pathlib import Path

from configurator import configure, settings

import numpy as np
import torch
import torch.nn.functional as F

from common import can_compile, model_config, setup
from entropy import entropy_without_matrix
from generate import read_prompts, step_of, store_column_major
from model import ModelConfig, Transformer
from position import Settings, repeat_heads
from stage import matrices, print_rows, write_result

tasks: list[str] = []        # train, scale, methods, eval, entropy, prefill, decode; []: all
peer = 'hf'                  # hf: transformers' Llama does the same work; '': without it
out_dir = 'out/bench'        # folder of the result
name = ''                    # name of the result; '': the device and the tasks
# model; settings that only some position methods have, such as rope_base, stand in position.py
position = 'rope'            # the peer uses RoPE; a model without RoPE is a little faster
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
n_hidden = 1408
short_conv = 0               # tokens that each short convolution reads; 0: none
vocab_size = 32000
# work
context = 1024               # L: tokens in a sequence of training and tuning; windows have 8L
batch_size = 4               # sequences per training step and tuning step
read_context = 4096          # tokens that prefill and entropy read, and that decode starts after
n_decode = 32                # tokens decoded in a round
rounds = 5                   # timed rounds, after two that warm up
# machine
device = 'auto'              # auto, cpu, cuda
dtype = 'auto'               # auto, float32, bfloat16; entropy always uses float32
compile = True               # compile training steps, and time windows and decoding compiled, too

PRODUCT = {'cpu': 2048, 'cuda': 8192}  # {device: rows of the large matrix product}


# ---------------------------------------------------------------------- arithmetic

def flops_per_token(model, length):
    """
    Forward FLOP per token in windows of `length` tokens: (matmuls, attention). Each weight counts
    2, as in a matmul. The input embedding is a look-up and costs nothing. Causal attention reads
    length / 2 keys on average, once for q.k and once for the sum of v. DAPE applies all its weights
    to each of these keys. What other methods compute for each key, such as FIRE's network, is left
    out.
    """
    c, look_up = model.config, model.embed.weight.numel()
    dape = sum(p.numel() for weight, p in model.named_parameters() if '.dape.' in weight)
    weights = model.n_params() - dape - (0 if c.tied else look_up)
    return 2 * weights, (2 * c.n_layer * c.n_embd + dape) * length


def step_flops(model):
    """
    FLOP of a training step. Backward computes the gradients of a layer's inputs, and those of its
    weights unless they are frozen, as in a head-scale step. Each costs as much as a forward pass.
    """
    matmul, attention = flops_per_token(model, context)
    passes = 3 if model.head.weight.requires_grad else 2
    return batch_size * context * (passes * matmul + 3 * attention)


def reading_flops(model, T, tail):
    """FLOP to read T tokens and compute the logits of the last `tail` tokens."""
    return T * sum(flops_per_token(model, T)) - (T - tail) * 2 * model.head.weight.numel()


# ---------------------------------------------------------------------- measuring

def seconds_of(work, runtime):
    """The time of one call."""
    wait = torch.get_device_module(runtime.device).synchronize  # on a CPU it does nothing
    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def peak_memory(work, runtime):
    """Most bytes of tensors during a call, minus the bytes held before it."""
    if runtime.device.type == 'cuda':
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events()
              if event.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def compare(title, works, flops, runtime):
    """
    Time functions in turns, print the numbers and return them. works: {name: function}, the first
    is what the others are compared with. flops: {name: FLOP of a call}, or {} if it is unknown.
    """
    size = PRODUCT[runtime.device.type]
    a = torch.randn(size, size, device=runtime.device, dtype=runtime.dtype)
    turns = []
    for _ in range(2 + rounds):
        turns.append([seconds_of(work, runtime) for work in (*works.values(), lambda: a @ a)])
    # of each of works, then of the product; the first two rounds warm up
    *times, product = np.array(turns[2:]).T                                    # each (rounds,)
    rate = 2 * size ** 3 / product                                             # FLOP/s

    found = {}
    for who, seconds in zip(works, times):
        ratio = seconds / times[0]
        row = {'seconds': np.median(seconds), 'ratio': np.median(ratio), 'from': ratio.min(),
               'to': ratio.max()}
        if flops:
            row['by_flop'] = flops[who] / [*flops.values()][0]
            row['of_limit'] = np.median(flops[who] / seconds / rate)
            row['peak_memory'] = peak_memory(works[who], runtime)
        found[who] = row
    title = f"{title}, {str(runtime.dtype).removeprefix('torch.')}"
    print_rows(runtime.print, [{title: who} | row for who, row in found.items()])
    return {'task': title} | found


# ---------------------------------------------------------------------- the models and their work

def new_model(block_size, runtime, **changes):
    config = {key: value for key, value in globals().items()
              if key in ModelConfig.__dataclass_fields__}
    config = model_config(config | {'block_size': block_size} | changes)
    return Transformer(config).init_weights().to(runtime.device)


class Peer(torch.nn.Module):
    """transformers' Llama of the same sizes, with the interface of our Transformer."""

    def __init__(self):
        super().__init__()
        import transformers
        config = transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=n_embd, intermediate_size=n_hidden,
            num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_kv_head)
        self.llama = transformers.LlamaForCausalLM(config)
        self.new_cache = partial(transformers.StaticCache, config)

    def forward(self, idx, targets=None, tail=0, cache=None):
        logits = self.llama(idx, past_key_values=cache, use_cache=cache is not None,
                            logits_to_keep=tail).logits
        if targets is None:
            return logits
        logits = logits[:, -targets.shape[1]:].flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten())


def only_scales(model, runtime):
    """Prepare the model as tune_scale.py does: only the head scales get gradients."""
    for p in matrices(model).values():
        p.data = p.data.to(runtime.dtype)
    for weight, p in model.named_parameters():
        p.requires_grad_(weight.endswith('head_scale'))
    return model


def both(block_size, runtime, frozen=False):
    """
    {name: model}: our model, and transformers' if `peer` is set. frozen: the weights have the
    runtime's precision, in our model only the matrices, as in stages that do not train.
    """
    models = {'ours': new_model(block_size, runtime)}
    if frozen:
        only_scales(models['ours'], runtime)
    if peer:
        dtype = runtime.dtype if frozen else torch.float32
        models['transformers'] = Peer().to(runtime.device, dtype)
    return models


def random_ids(B, T, runtime):
    return torch.randint(vocab_size, (B, T), device=runtime.device)


def training_step(model, runtime):
    """
    A function that does one step on random tokens, with the parts of a step of train.py and
    tune_scale.py: loss, backward, clipping, optimizer.
    """
    x, y = (random_ids(batch_size, context, runtime) for _ in range(2))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    net = torch.compile(model, dynamic=False) if can_compile(runtime, compile) else model

    def step():
        with runtime.autocast():
            loss = net(x, y).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step


# ---------------------------------------------------------------------- tasks

def compare_steps(title, models, runtime):
    works = {who: training_step(model, runtime) for who, model in models.items()}
    flops = {who: step_flops(models['ours'] if isinstance(model, Peer) else model)
             for who, model in models.items()}
    return compare(title, works, flops, runtime)


def time_train(runtime):
    return compare_steps('training step', both(context, runtime), runtime)


def time_scale(runtime):
    """A step of head-scale tuning (ours) beside a whole training step."""
    models = {'whole step': new_model(context, runtime),
              'ours': only_scales(new_model(context, runtime), runtime)}
    return compare_steps('head-scale step', models, runtime)


def time_methods(runtime):
    """Training steps of position methods beside that of NoPE."""
    models = {'NoPE': new_model(context, runtime, position='none'),
              'Kerple': new_model(context, runtime, position='kerple'),
              'DAPE 1x3 Kerple': new_model(context, runtime, position='kerple', dape_kernel=3)}
    return compare_steps('training step', models, runtime)


@torch.no_grad()
def time_eval(runtime):
    """
    A window of 8L tokens that scores its last L / 8. Our model computes only the logits of these
    tokens; transformers' code computes all logits.
    """
    T, scored = 8 * context, context // 8
    models, works = both(context, runtime, frozen=True), {}
    ids = random_ids(1, T + 1, runtime)
    window = ids[:, :-1], ids[:, -scored:]
    for who, model in models.items():
        works[who] = partial(model, *window)
        if can_compile(runtime, compile):
            works[f'{who}, compiled'] = partial(torch.compile(model, dynamic=False), *window)
    flops = dict.fromkeys(works, reading_flops(models['ours'], T, scored))
    with runtime.autocast():
        return compare(f'sliding window of {T}', works, flops, runtime)


@torch.no_grad()
def time_entropy(runtime):
    """Entropy of every head of a layer, by the kernel and from the matrix of all weights."""
    T, D = read_context, n_embd // n_head
    runtime = setup(device, 'float32')  # entropy.py computes in float32, too
    q = torch.randn(1, n_head, T, D, device=runtime.device)
    k = q[:, :n_kv_head].contiguous()
    keys = repeat_heads(k, n_head)
    later = torch.ones(T, T, dtype=torch.bool, device=runtime.device).triu(1)

    def matrix():
        weights = (q @ keys.mT).mul_(D ** -0.5).masked_fill_(later, -torch.inf).softmax(-1)
        return torch.special.entr(weights, out=weights).sum(-1)  # entr(a) is -a ln a

    works = {'ours': partial(entropy_without_matrix, q, k), 'matrix': matrix}
    flops = dict.fromkeys(works, 2 * n_embd * T ** 2)  # q.k, mean key: half the keys each
    return compare(f'entropy of {T}', works, flops, runtime)


@torch.no_grad()
def time_prefill(runtime):
    """Read a prompt into a cache."""
    T, models = read_context, both(read_context, runtime, frozen=True)
    prompt = random_ids(1, T, runtime).tolist()
    works = {who: partial(read_prompts, model, prompt, n_decode) for who, model in models.items()}
    flops = dict.fromkeys(works, reading_flops(models['ours'], T, 1))
    with runtime.autocast():
        return compare(f'prefill of {T}', works, flops, runtime)


@torch.no_grad()
def time_decode(runtime):
    """
    Greedy decoding of tokens one by one. The pass over the prompt before is not counted. Each
    round then cuts the cache back to the prompt, so that the next one does the same.
    """
    models, works = both(read_context, runtime, frozen=True), {}
    prompt = random_ids(1, read_context, runtime).tolist()
    store_column_major(models['ours'])  # stages that decode do the same

    def decoding(model, compiled):
        logits, cache = read_prompts(model, prompt, n_decode)
        first, step = logits.argmax(-1, keepdim=True), step_of(model, cache, compiled)
        if compiled and step is model:  # step_of() leaves models of transformers as they are
            step = torch.compile(model, dynamic=False)

        def work():
            token = first
            for _ in range(n_decode):
                token = step(token, tail=1, cache=cache)[:, -1].argmax(-1, keepdim=True)
            forget(cache, n_decode)
        return work

    with runtime.autocast():
        for who, model in models.items():
            works[who] = decoding(model, False)
            if can_compile(runtime, compile):
                works[f'{who}, compiled'] = decoding(model, True)
        return compare(f'{n_decode} tokens after {read_context}', works, {}, runtime)


def forget(cache, n):
    """Cut a cache, ours or transformers', back by n tokens."""
    if hasattr(cache, 'layers'):
        for layer in cache.layers:
            layer.cumulative_length -= n
    else:
        cache.length -= n


TASKS = {'train': time_train, 'scale': time_scale, 'methods': time_methods, 'eval': time_eval,
         'entropy': time_entropy, 'prefill': time_prefill, 'decode': time_decode}


def main():
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # else each profile prints messages
    runtime, results = setup(device, dtype), {}
    path = Path(out_dir, name or '_'.join([runtime.device.type, *tasks]))
    for task in tasks or TASKS:
        results[task] = [TASKS[task](runtime)]
        write_result(path, {'results': results}, settings(globals()), runtime)


if __name__ == '__main__':
    # configure() adds the fields of position.Settings, such as rope_base, to this file's globals.
    configure(globals(), Settings)
    main()
