"""
How fast the stages run, compared with the limit of the hardware, and with transformers' Llama on
the same work.

$ python -m extras.bench              # on a CPU: 8 layers x 512, T = 1,024, vocabulary 32,000
$ python -m extras.bench --peer=hf    # transformers' Llama takes turns with ours

Every time is the median of `rounds` calls. The limit is the time that only the arithmetic takes at
the rate of a large matrix product. This rate is measured on the same device in the same precision.
In decoding, the limit is the time to read every weight and key once at the measured memory
bandwidth. Writes out_dir/NAME.json
"""

import functools
import itertools
import math
import os
import statistics
import time
from dataclasses import fields
from functools import partial
from pathlib import Path

from configurator import configure, settings

import torch
import torch.nn.functional as F

from common import can_compile, model_config, setup
from entropy import entropy_without_matrix
from generate import needs_equal_lengths, read_prompts, step_of, store_column_major
from model import ModelConfig, Transformer
from position import Settings, repeat_heads
from stage import matrices, print_rows, write_result

tasks: list[str] = ['train', 'scale', 'eval', 'entropy', 'prefill', 'decode']
peer = ''                    # hf: transformers' Llama does the same work, in turns with ours
out_dir = 'out/bench'        # folder of the result
name = ''                    # name of the result; '': the device, cpu or cuda
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
context = 1024               # T: tokens in a sequence
batch_size = 4               # sequences per training step, tuning step or pass of evaluation
read_context = 4096          # tokens that prefill and entropy read, and that decode starts after
n_decode = 32                # tokens decoded in a round
rounds = 7                   # timed calls of each function; the result is their median
# machine
device = 'auto'              # auto, cpu, cuda
dtype = 'auto'               # auto, float32, bfloat16; entropy always uses float32
compile = True               # torch.compile training steps and evaluation, ours and the peer's
seed = 1337


# ---------------------------------------------------------------------- limits

def synchronize(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


@functools.cache  # measured once, so that all limits of a run agree
def matmul_flops(device, dtype, seconds=0.3):
    """
    FLOP/s of a large square matrix product in this precision: the best of the products done in
    `seconds`. On a CPU the clock counts only the time that this thread computes, which excludes
    most of the time that other processes take.
    """
    clock = time.thread_time if device.type == 'cpu' else time.perf_counter
    size = 8192 if device.type == 'cuda' else 2048
    a = torch.randn(size, size, device=device, dtype=dtype)
    a @ a  # the first product may take a second, because the library loads
    synchronize(device)
    best, stop = math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < stop:
        start = clock()
        a @ a
        synchronize(device)
        best = min(best, clock() - start)
    return 2 * size ** 3 / best


def least_seconds(runtime, flops):
    """The time that this arithmetic takes at the rate of a large matrix product."""
    return flops / matmul_flops(runtime.device, runtime.dtype)


def flops_per_token(model, length):
    """
    Forward FLOP per token in windows of `length` tokens: (matmuls, attention). Each weight counts
    2, as in a matmul. The input embedding is a look-up and costs nothing. Causal attention reads
    length / 2 keys on average, once for q.k and once for the sum of v. DAPE applies all its weights
    to each of these keys. What other methods compute for each key, such as FIRE's network, is left
    out.
    """
    c, look_up = model.config, model.embed.weight.numel()
    dape = sum(p.numel() for name, p in model.named_parameters() if '.dape.' in name)
    weights = model.n_params() - dape - (0 if c.tied else look_up)
    return 2 * weights, (2 * c.n_layer * c.n_embd + dape) * length


def reading_flops(model, T, tail):
    """The FLOP to read T tokens and compute the logits of the last `tail` tokens."""
    return T * sum(flops_per_token(model, T)) - (T - tail) * 2 * model.head.weight.numel()


# ---------------------------------------------------------------------- measuring

def medians(works, runtime):
    """
    The median seconds of each function. works: {name: function}. The functions take turns in each
    round, because machines are noisy. The first two rounds only warm up. Raises RuntimeError if a
    later round compiles something.
    """
    turns = {who: [] for who in works}
    for turn in range(2 + rounds):
        with torch.compiler.set_stance('default' if turn < 2 else 'fail_on_recompile'):
            for who, work in works.items():
                synchronize(runtime.device)
                start = time.perf_counter()
                work()
                synchronize(runtime.device)
                turns[who].append(time.perf_counter() - start)
    return {who: statistics.median(seconds[2:]) for who, seconds in turns.items()}


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


def timings(task, works, tokens, limits, runtime):
    """
    Time the functions of a task and print the numbers. limits: {name: least possible seconds}, or
    one number for all names. Returns the task, its tokens and limits, and {name: numbers}.
    """
    if not isinstance(limits, dict):
        limits = dict.fromkeys(works, limits)
    rows = {}
    for who, seconds in medians(works, runtime).items():
        rows[who] = {'seconds': seconds, 'tokens_per_second': tokens / seconds,
                     'of_limit': limits[who] / seconds,
                     'times_ours': seconds / rows['ours']['seconds'] if rows else 1.0,
                     'peak_memory': peak_memory(works[who], runtime)}
    print_rows(runtime.print, [{task: who} | row for who, row in rows.items()])
    return {'task': task, 'tokens': tokens, 'limit_seconds': limits} | rows


# ---------------------------------------------------------------------- the models and their work

def new_model(block_size, runtime, **changes):
    torch.manual_seed(seed)
    config = {one.name: globals()[one.name] for one in fields(ModelConfig)
              if one.name in globals()}
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
        llama = transformers.LlamaForCausalLM(config)
        self.model, self.head = llama.model, llama.lm_head
        self.new_cache = lambda max_length: transformers.DynamicCache(config=config)

    def hidden(self, idx, cache=None):
        return self.model(idx, past_key_values=cache, use_cache=cache is not None)[0]

    def forward(self, idx, targets=None, tail=0, cache=None):
        logits = self.head(self.hidden(idx, cache)[:, -tail:])
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


def compiled(model, runtime):
    return torch.compile(model, dynamic=False) if can_compile(runtime, compile) else model


def training_step(model, B, T, runtime):
    """
    A function that does one step on random tokens, with the parts of a step of train.py and
    tune_scale.py: loss, backward, clipping, optimizer.
    """
    x, y = random_ids(B, T, runtime), random_ids(B, T, runtime)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = compiled(model, runtime)

    def step():
        with runtime.autocast():
            loss = forward(x, y).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step


# ---------------------------------------------------------------------- tasks

def train(runtime):
    models = both(context, runtime)
    works = {who: training_step(model, batch_size, context, runtime)
             for who, model in models.items()}
    n = batch_size * context
    limit = least_seconds(runtime, 3 * n * sum(flops_per_token(models['ours'], context)))
    return timings('training step', works, n, limit, runtime)


def scale(runtime):
    """A step of head-scale tuning, compared with a whole training step."""
    model, n = new_model(context, runtime), batch_size * context
    tuned = only_scales(new_model(context, runtime), runtime)
    works = {'ours': training_step(tuned, batch_size, context, runtime),
             'whole step': training_step(model, batch_size, context, runtime)}
    # In forward passes: the pass itself, gradients for lower layers, and in a whole step gradients
    # of weights. The backward of attention counts 2.
    matmul, attention = (least_seconds(runtime, n * flops)
                         for flops in flops_per_token(model, context))
    limits = {'ours': 2 * matmul + 3 * attention, 'whole step': 3 * matmul + 3 * attention}
    return timings('head-scale step', works, n, limits, runtime)


@torch.no_grad()
def sliding_windows(runtime):
    """
    Batches of windows that score their last L/8 tokens. Our model computes only the logits of these
    tokens; transformers' code computes all logits.
    """
    scored, models = math.ceil(context / 8), both(context, runtime, frozen=True)
    batches = random_ids(4 * batch_size, context + 1, runtime).split(batch_size)

    def read_all(model):
        for batch in batches:
            model(batch[:, :-1], batch[:, -scored:])

    works = {who: partial(read_all, compiled(model, runtime)) for who, model in models.items()}
    works['ours'] = runtime.autocast()(works['ours'])  # the other model needs none
    n = 4 * batch_size
    limit = least_seconds(runtime, n * reading_flops(models['ours'], context, scored))
    return timings('sliding windows', works, n * context, limit, runtime)


def entropy(runtime):
    """Entropy of every head of a layer, by the kernel and by the float32 matrix, in place."""
    T, D = read_context, n_embd // n_head
    q = torch.randn(1, n_head, T, D, device=runtime.device)
    k = q[:, :n_kv_head].contiguous()
    later = torch.full((T, T), -1e9, device=runtime.device).triu(1)  # exp(-1e9) is 0

    def matrix():
        scores = q @ repeat_heads(k, n_head).mT
        scores.mul_(D ** -0.5).add_(later)
        log_a = scores.sub_(scores.logsumexp(-1, keepdim=True))
        return -log_a.exp().mul_(log_a).sum(-1)

    works = {'ours': partial(entropy_without_matrix, q, k), 'matrix': matrix}
    flops = 2 * n_embd * T ** 2  # q.k and the sum over keys, for half of the pairs
    limit = flops / matmul_flops(runtime.device, torch.float32)
    return timings(f'entropy, T = {T}', works, T, limit, runtime)


@torch.no_grad()
def prefill(runtime):
    T, models = read_context, both(read_context, runtime, frozen=True)
    prompt = random_ids(1, T, runtime).tolist()
    works = {who: partial(read_prompts, model, prompt, n_decode) for who, model in models.items()}
    works['ours'] = runtime.autocast()(works['ours'])
    limit = least_seconds(runtime, reading_flops(models['ours'], T, 1))
    return timings(f'prefill, T = {T}', works, T, limit, runtime)


@torch.no_grad()
def decode(runtime):
    """
    Greedy decoding of tokens one by one, after read_context tokens. `compiled` uses one graph that
    is compiled for all steps. The pass over the prompt is not counted.
    """
    T, models = read_context, both(read_context, runtime, frozen=True)
    ours, prompt = models['ours'], random_ids(1, T, runtime).tolist()
    store_column_major(ours)  # stages that decode do the same

    def decoding(model, compile=False):
        with runtime.autocast():
            logits, cache = read_prompts(model, prompt, n_decode)
        step, first = step_of(model, cache, compile), logits.argmax(-1, keepdim=True)

        def work():
            token = first
            for _ in range(n_decode):
                token = step(token, tail=1, cache=cache)[:, -1].argmax(-1, keepdim=True)
            if model is ours:  # cut the cache back to the prompt
                cache.length -= n_decode
            else:
                cache.crop(-n_decode)
        return runtime.autocast()(work) if model is ours else work

    works = {who: decoding(model) for who, model in models.items()}
    if can_compile(runtime, compile) and not needs_equal_lengths(ours):
        works['compiled'] = decoding(ours, True)
    weights, c = ours.n_params() - ours.embed.weight.numel(), ours.config
    keys = 2 * c.n_layer * c.n_kv_head * c.head_dim * (T + n_decode / 2)
    # To measure memory bandwidth: 256 MB, on a GPU 4 GB, which takes it far longer than the launch.
    x = torch.ones(2 ** (30 if runtime.device.type == 'cuda' else 26), device=runtime.device)
    bandwidth = 4 * x.numel() / medians({'sum': x.sum}, runtime)['sum']
    limit = n_decode * runtime.dtype.itemsize * (weights + keys) / bandwidth
    return timings(f'decode, T = {T}', works, n_decode, limit, runtime)


TASKS = {'train': train, 'scale': scale, 'eval': sliding_windows, 'entropy': entropy,
         'prefill': prefill, 'decode': decode}


def main():
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # else each profile prints messages
    runtime = setup(device, dtype, seed)
    flops = matmul_flops(runtime.device, runtime.dtype)
    print(f'{runtime.device}, {runtime.dtype}: a large matrix product does {flops / 1e12:.2f} '
          'TFLOP/s')
    results = {task: TASKS[task](runtime) for task in tasks}
    path = Path(out_dir, name or runtime.device.type)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, {'matmul_flops': flops, 'results': results}, settings(globals()), runtime)


if __name__ == '__main__':
    # configure() adds the fields of position.Settings, such as rope_base, to this file's globals.
    configure(globals(), Settings)
    main()
