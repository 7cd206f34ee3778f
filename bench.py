"""
How fast the stages run. The bench compares them with the limit of the hardware, and with
transformers' Llama on the same work.

$ python bench.py              # the CPU bench shape: 8 layers x 512, T = 1,024, vocabulary 32,000
$ python bench.py --peer=hf    # transformers' Llama takes turns with ours; needs transformers
$ python bench.py --like="['config/nope_1b.py']" --tasks="['train','scale']"   # a config's model

Every time is the median of `rounds` calls. The limit is the time that only the arithmetic takes at
the rate of a large matrix product. This rate is measured on the same device in the same precision.
In decoding, the limit is the time to read every weight and key once at the measured memory
bandwidth. Writes out_dir/NAME.json. results/bench/table.py measures growth with the context, and
position methods.
"""

import contextlib
import dataclasses
import functools
import math
import os
import statistics
import time
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import kernels
import position as methods
from configurator import between, configure, run_config, settings
from lib import plots
from lib.answers import OnlyWriter, note, optional, print_rows, result_path
from lib.checkpoints import cast_matrices, config_of
from lib.devices import can_compile, compiled, matmul_flops, setup, synchronize
from lib.errors import UserError
from lib.exports import their_config
from lib.generate import new_cache, step_of, store_column_major
from model import ModelConfig, Transformer

tasks: list[str] = ['train', 'scale', 'eval', 'entropy', 'prefill', 'decode']
peer = ''                    # hf: transformers' Llama does the same work, in turns with ours
out_dir = 'out/bench'        # folder of the result
name = ''                    # name of the result; '': the device, cpu or cuda
# model; position.py declares the settings of single position methods
like: list[str] = []         # training configs that set the model; their block_size sets context
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
profile = False              # also show in which operators a task spends its time
# machine
device = 'auto'              # auto, cpu, cuda
dtype = 'auto'               # auto, float32, bfloat16; entropy always uses float32
compile = True               # torch.compile training steps and evaluation, ours and the peer's
seed = 1337

MODEL = [field.name for field in dataclasses.fields(ModelConfig)]

# In all functions below, s holds the settings by name, and s.runtime.


# ---------------------------------------------------------------------- measuring

rate = functools.cache(matmul_flops)  # measured once, so that all limits of a run agree


def least_seconds(s, flops):
    """The time that this arithmetic takes at the rate of a large matrix product."""
    return flops / rate(s.runtime.device, s.runtime.dtype)


def seconds_of(work, runtime):
    synchronize(runtime.device)
    start = time.perf_counter()
    work()
    synchronize(runtime.device)
    return time.perf_counter() - start


def medians(s, works):
    """
    The median seconds of each function. works: {name: function}. The functions take turns in each
    round, because machines are noisy. The first two rounds only warm up. Raises RuntimeError if a
    later round compiles something.
    """
    turns = {who: [] for who in works}
    for turn in range(2 + s.rounds):
        with torch.compiler.set_stance('default' if turn < 2 else 'fail_on_recompile'):
            for who, work in works.items():
                turns[who].append(seconds_of(work, s.runtime))
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
    held, most = 0, 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == '[memory]':
            held += event.nbytes()
            most = max(most, held)
    return most


def by_operator(work, runtime):
    """{name: seconds} of the ten operators in which a call spends the most time."""
    with torch.profiler.profile() as profiler:
        work()
        synchronize(runtime.device)
    kind = 'device' if runtime.device.type == 'cuda' else 'cpu'
    seconds = attrgetter(f'self_{kind}_time_total')
    longest = sorted(profiler.key_averages(), key=seconds, reverse=True)[:10]
    return {event.key: seconds(event) / 1e6 for event in longest}


def timings(s, task, works, tokens, limits):
    """
    Time the functions of a task and print the numbers. Returns {name: {seconds, tokens_per_second,
    of_limit, times_ours, peak_memory}}, the task, its tokens and limits. limits: {name: least
    possible seconds}, or one number for all names. With `profile`, each entry also has `operators`,
    from by_operator().
    """
    if not isinstance(limits, dict):
        limits = dict.fromkeys(works, limits)
    rows, say = {}, s.runtime.print
    for who, seconds in medians(s, works).items():
        rows[who] = {'seconds': seconds, 'tokens_per_second': tokens / seconds,
                     'of_limit': limits[who] / seconds,
                     'times_ours': seconds / rows['ours']['seconds'] if rows else 1.0,
                     'peak_memory': peak_memory(works[who], s.runtime)}
    print_rows(say, [{task: who} | row for who, row in rows.items()])
    for who in works if s.profile else ():
        operators = rows[who]['operators'] = by_operator(works[who], s.runtime)
        print_rows(say, [{'operator': name, f'seconds of {who}': seconds}
                         for name, seconds in operators.items()])
    return {'task': task, 'tokens': tokens, 'limit_seconds': limits} | rows


# ---------------------------------------------------------------------- the models and their work

def new_model(s, block_size, **changes):
    torch.manual_seed(s.seed)
    config = config_of(vars(s) | changes, block_size=block_size)
    return Transformer(config).init_weights().to(s.runtime.device)


class Peer(torch.nn.Module):
    """transformers' Llama of the same sizes, with the interface of our Transformer."""

    def __init__(self, config):
        super().__init__()
        transformers = optional('transformers')
        self.make_cache = transformers.DynamicCache
        config = their_config(config, torch.float32) | {'attn_implementation': 'sdpa'}
        self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))

    def forward(self, idx, targets=None, tail=0, cache=None):
        if targets is None:
            return self.llama(idx, past_key_values=cache, use_cache=cache is not None,
                              logits_to_keep=tail).logits
        if targets.shape == idx.shape:
            return self.llama(idx, labels=idx).loss  # Llama shifts the labels itself
        logits = self.llama(idx).logits[:, -targets.shape[1]:].float()
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction='none')

    def new_cache(self, max_length):
        return self.make_cache(config=self.llama.config)


def both(s, block_size, frozen=False):
    """
    {name: model}: our model, and transformers' if `peer` is set. frozen: the weights need no
    gradient and have the runtime's precision, in our model only the matrices, as in stages that do
    not train.
    """
    models = {'ours': new_model(s, block_size)}
    if s.peer:
        twin = config_of(vars(s), block_size=block_size, position='rope')
        models['transformers'] = Peer(twin).to(s.runtime.device)
    if frozen:
        cast_matrices(models['ours'].requires_grad_(False), s.runtime.dtype)
        if s.peer:
            models['transformers'].requires_grad_(False).to(s.runtime.dtype)
    return models


def as_in_stages(s, who, work):
    """A function that calls work() in autocast if it is our model's. transformers needs none."""
    def inside():
        with s.runtime.autocast() if who == 'ours' else contextlib.nullcontext():
            return work()
    return inside


def only_scales(model, runtime):
    """Prepare the model as tune_scale.py does: only the head scales get gradients."""
    for weight, p in cast_matrices(model, runtime.dtype).named_parameters():
        p.requires_grad_(weight.endswith('head_scale'))
    return model


def random_ids(s, B, T):
    return torch.randint(s.vocab_size, (B, T), device=s.runtime.device)


def training_step(s, model, B, T):
    """
    Returns a function that does one step on random tokens. The step has the parts of a step in
    train.py and tune_scale.py: loss, backward, clipping, optimizer.
    """
    x, y = random_ids(s, B, T), random_ids(s, B, T)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = compiled(model, s.runtime, s.compile)

    def step():
        with s.runtime.autocast():
            loss = forward(x, y).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def reading_flops(model, T, tail):
    """
    The FLOP to read T tokens and compute the logits of the last `tail` tokens. For the other tokens
    the last layer computes only queries, keys and values. The attention of a query grows with its
    position.
    """
    (matmul, attention), unread = model.flops_per_token(T), T - tail
    head, block = 2 * model.head.weight.numel(), model.blocks[-1]
    after = block.attn.out.weight.numel() + sum(p.numel() for p in block.mlp.parameters())
    skipped = unread * (2 * after + head) + unread ** 2 / T * attention / len(model.blocks)
    return T * (matmul + attention) - skipped


# ---------------------------------------------------------------------- tasks

def train(s):
    B, T = s.batch_size, s.context
    models = both(s, T)
    works = {who: training_step(s, model, B, T) for who, model in models.items()}
    limit = least_seconds(s, 3 * B * T * sum(models['ours'].flops_per_token(T)))
    return timings(s, 'training step', works, B * T, limit)


def step_limits(s, model, tokens, T, forwards=1):
    """
    Lower bounds in seconds for a head-scale step ('ours') and for a whole step on windows of T.
    Returns {name: seconds of products with weights}, and the seconds of attention. The unit of the
    count is a forward pass. Each forward counts 1. Gradients for lower layers count 1. Gradients of
    weights count 1, in a whole step only. The backward of attention counts 2.
    """
    matmul, attention = [least_seconds(s, tokens * flops) for flops in model.flops_per_token(T)]
    linear = {'ours': (forwards + 1) * matmul, 'whole step': (forwards + 2) * matmul}
    return linear, (forwards + 2) * attention


def scale(s):
    """A step of head-scale tuning, compared with a whole training step."""
    B, T = s.batch_size, s.context
    model, tuned = new_model(s, T), only_scales(new_model(s, T), s.runtime)
    works = {'ours': training_step(s, tuned, B, T), 'whole step': training_step(s, model, B, T)}
    linear, quadratic = step_limits(s, model, B * T, T)
    limits = {who: seconds + quadratic for who, seconds in linear.items()}
    return timings(s, 'head-scale step', works, B * T, limits)


@torch.no_grad()
def sliding_windows(s):
    """
    Batches of windows that score their last L/8 tokens. Our model computes only the logits of these
    tokens; transformers' code computes all logits. Each model runs compiled and uncompiled.
    """
    n, T, works = 4 * s.batch_size, s.context, {}
    scored, batches = math.ceil(T / 8), random_ids(s, n, T + 1).split(s.batch_size)

    def read_all(model):
        for batch in batches:
            model(batch[:, :-1], batch[:, -scored:])

    models = both(s, T, frozen=True)
    for who, model in models.items():
        works[who] = as_in_stages(s, who, partial(read_all, compiled(model, s.runtime, s.compile)))
        works[f'{who}, uncompiled'] = as_in_stages(s, who, partial(read_all, model))
    limit = least_seconds(s, n * reading_flops(models['ours'], T, scored))
    return timings(s, 'sliding windows', works, n * T, limit)


def entropy(s):
    """Entropy of every head of a layer, by the kernel and by the float32 matrix, in place."""
    T, D = s.read_context, s.n_embd // s.n_head
    q = torch.randn(1, s.n_head, T, D, device=s.runtime.device)
    k = q[:, :s.n_kv_head].contiguous()
    later = torch.full((T, T), -1e9, device=s.runtime.device).triu(1)  # exp(-1e9) is 0

    def matrix():
        scores = q @ kernels.repeat_heads(k, s.n_head).transpose(-1, -2)
        scores.mul_(D ** -0.5).add_(later)
        log_a = scores.sub_(scores.logsumexp(-1, keepdim=True))
        return -log_a.exp().mul_(log_a).sum(-1)

    works = {'ours': partial(kernels.entropy_without_matrix, q, k), 'matrix': matrix}
    flops = 2 * s.n_embd * T ** 2  # q.k and the sum over keys, for half of the pairs
    limit = flops / rate(s.runtime.device, torch.float32)
    return timings(s, f'entropy, T = {T}', works, T, limit)


def cache_and_first(model, idx, n_new, dtype):
    """Prefill. Returns the cache, with room for n_new more tokens, and the first new token."""
    cache = new_cache(model, 1, idx.shape[1] + n_new, dtype)
    logits = model(idx, tail=1, cache=cache)
    return cache, logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def prefill(s):
    T = s.read_context
    models, idx = both(s, T, frozen=True), random_ids(s, 1, T)
    works = {who: as_in_stages(s, who, partial(cache_and_first, model, idx, s.n_decode,
                                               s.runtime.dtype))
             for who, model in models.items()}
    limit = least_seconds(s, reading_flops(models['ours'], T, 1))
    return timings(s, f'prefill, T = {T}', works, T, limit)


@torch.no_grad()
def decode(s):
    """
    Greedy decoding of tokens one by one, after read_context tokens. `compiled` uses one graph that
    is compiled for all steps. The pass over the prompt is not counted.
    """
    T, n_decode = s.read_context, s.n_decode
    models, idx = both(s, T, frozen=True), random_ids(s, 1, T)
    ours = models['ours']
    store_column_major(ours)  # stages that decode do the same

    def decoding(who, compile=False):
        model = models[who]
        first_pass = partial(cache_and_first, model, idx, n_decode, s.runtime.dtype)
        cache, first = as_in_stages(s, who, first_pass)()
        step = step_of(model, cache, compile)

        def work():
            token = first
            for _ in range(n_decode):
                token = step(token, tail=1, cache=cache)[:, -1].argmax(-1, keepdim=True)
            if model is ours:  # cut the cache back to the prompt
                cache.length -= n_decode
            else:
                cache.crop(-n_decode)
        return as_in_stages(s, who, work)

    works = {who: decoding(who) for who in models}
    if can_compile(s.runtime, s.compile) and not ours.needs_equal_lengths:
        works['compiled'] = decoding('ours', True)
    weights, c = ours.n_params() - ours.embed.weight.numel(), ours.config
    keys = 2 * c.n_layer * c.n_kv_head * c.head_dim * (T + n_decode / 2)
    # To measure memory bandwidth: 256 MB, on a GPU 4 GB, which takes it far longer than the launch.
    x = torch.ones(2 ** (30 if s.runtime.device.type == 'cuda' else 26), device=s.runtime.device)
    bandwidth = 4 * x.numel() / medians(s, {'sum': x.sum})['sum']
    limit = n_decode * s.runtime.dtype.itemsize * (weights + keys) / bandwidth
    return timings(s, f'decode, T = {T}', works, n_decode, limit)


TASKS = {'train': train, 'scale': scale, 'eval': sliding_windows, 'entropy': entropy,
         'prefill': prefill, 'decode': decode}


# ---------------------------------------------------------------------- a run

def with_like(chosen, given):
    """
    The settings `chosen`, with those of the model and its context from the configs in `like`. The
    settings that the user gave stay.
    """
    values = {'position': 'none'}
    for config in chosen['like']:
        values |= run_config(config)
    if 'n_layer' not in values:
        raise UserError(f"like is {chosen['like']}, which sets no n_layer. Give the config that "
                        'trains the model.')
    values['context'] = values.pop('block_size', chosen['context'])
    unknown = {*MODEL} & values.keys() - chosen.keys()
    if unknown:
        raise UserError(f'like sets {min(unknown)}, which bench.py does not have. Leave it out of '
                        'the config, or measure another model.')
    if 'vocab_size' not in given:  # a config sets none, because the vocabulary is that of the text
        note(f"the model has a vocabulary of {chosen['vocab_size']:,}, whatever text the config "
             'names. Set --vocab_size= to that of the text')
    names = chosen.keys() & {*MODEL, 'context'} & values.keys() - set(given)
    return chosen | {name: values[name] for name in names}


def run_works(chosen, given, works):
    """
    Measure each function of works, {name: function of s}, and write the results. chosen: all
    settings; given: the names of the settings that the user gave.
    """
    if not works:
        raise UserError('tasks is empty. Name at least one.')
    began, runtime = time.perf_counter(), setup(chosen['device'], chosen['dtype'], chosen['seed'])
    if chosen['peer'] not in ('', 'hf'):
        raise UserError(f"peer is '{chosen['peer']}'. Choose hf, or leave it empty.")
    if runtime.world_size > 1:
        raise UserError('bench.py measures only one device. Start it without torchrun.')
    between(chosen, 1, 'context', 'batch_size', 'read_context', 'n_decode', 'rounds')
    if chosen['like']:
        chosen = with_like(chosen, given)
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # else each profile prints a message
    flops = rate(runtime.device, runtime.dtype)
    print(f'{runtime.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, '
          f'{runtime.dtype}: a large matrix product does {flops / 1e12:.2f} TFLOP/s')

    s = SimpleNamespace(**chosen, runtime=runtime)
    path = result_path(s.out_dir, s.name or runtime.device.type)
    with OnlyWriter(f'{path}.json'):
        results = {name: work(s) for name, work in works.items()}
        plots.write_result(path, {'stage': 'bench', 'matmul_flops': flops, 'results': results},
                           chosen, runtime, began)


def main(given=()):
    """given: the names of the settings that the user gave."""
    if not set(tasks) <= set(TASKS):
        raise UserError(f"tasks is {tasks}. Choose from: {', '.join(TASKS)}.")
    run_works(settings(globals()), given, {task: TASKS[task] for task in tasks})


if __name__ == '__main__':
    main(configure(globals(), methods.Settings))
