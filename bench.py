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

import dataclasses
import functools
import os
import statistics
import time
from functools import partial
from operator import attrgetter

import torch
import torch.nn.functional as F

import kernels
import position as methods
from configurator import between, configure, run_config, settings
from lib import plots
from lib.answers import optional, print_rows, result_path
from lib.checkpoints import cast_matrices, config_of
from lib.devices import can_compile, compiled, matmul_flops, setup, synchronize
from lib.errors import UserError
from lib.generate import needs_equal_lengths, new_cache, step_of, store_column_major
from lib.huggingface import their_config
from model import ModelConfig, Transformer

tasks = ['train', 'scale', 'eval', 'entropy', 'prefill', 'decode']
peer = ''                    # hf: transformers' Llama does the same work, in turns with ours
out_dir = 'results/bench'
name = ''                    # name of the result; empty: name of the device, cpu or cuda
# the model; the other settings of its position method are declared in position.py
like: list[str] = []         # training configs that set the model; their block_size sets context
position = 'rope'            # the peer uses RoPE; a model without RoPE is a little faster
n_layer = 8
n_head = 8
n_kv_head = 2
n_embd = 512
n_hidden = 1408
vocab_size = 32000
# the work
context = 1024               # T: tokens in a sequence
batch_size = 4               # sequences per training step, tuning step or pass of evaluation
read_context = 4096          # tokens that prefill and entropy read, and that decode starts after
n_decode = 32                # tokens decoded in a round
rounds = 7
profile = False              # also show in which operators a task spends its time
# machine
device = 'auto'              # auto, cpu, cuda
dtype = 'auto'               # auto, float32, bfloat16; entropy always uses float32
compile = True               # torch.compile training steps and evaluation, ours and the peer's
seed = 1337

MODEL = [field.name for field in dataclasses.fields(ModelConfig)]


# ---------------------------------------------------------------------- measuring

rate = functools.cache(matmul_flops)  # measured once, so that all limits of a run agree


def seconds_of(work, runtime):
    synchronize(runtime.device)
    start = time.perf_counter()
    work()
    synchronize(runtime.device)
    return time.perf_counter() - start


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
                turns[who].append(seconds_of(work, runtime))
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


def measure(task, works, tokens, limits, runtime):
    """
    Measure a task, print its numbers and return {name: {seconds, tokens_per_second, of_limit,
    times_ours, peak_memory}}. limits: {name: least possible seconds}, or one number for all names.
    With `profile`, each entry also has `operators`, from by_operator().
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
    for who in works if profile else ():
        rows[who]['operators'] = by_operator(works[who], runtime)
        print_rows(runtime.print, [{'operator': name, f'seconds of {who}': seconds}
                           for name, seconds in rows[who]['operators'].items()])
    return {'task': task, 'tokens': tokens, 'limit_seconds': limits} | rows


# ---------------------------------------------------------------------- the models and their work

def new_model(block_size, runtime, **changes):
    torch.manual_seed(seed)
    config = config_of(settings(globals()) | changes, block_size=block_size)
    return Transformer(config).init_weights().to(runtime.device)


class Peer(torch.nn.Module):
    """transformers' Llama of the same sizes, with the interface of our Transformer."""
    scale_sets = None

    def __init__(self, block_size):
        super().__init__()
        transformers = optional('transformers')
        self.make_cache = transformers.DynamicCache
        twin = config_of(settings(globals()), block_size=block_size, position='rope')
        config = their_config(twin, torch.float32) | {'attn_implementation': 'sdpa'}
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


def both(block_size, runtime, frozen=False):
    """
    {name: model}: our model, and transformers' if `peer` is set. frozen: the weights need no
    gradient and have the runtime's precision, as in stages that do not train.
    """
    models = {'ours': new_model(block_size, runtime)}
    if peer:
        models['transformers'] = Peer(block_size).to(runtime.device)
    if frozen:
        for model in models.values():
            model.requires_grad_(False).to(runtime.dtype)
    return models


def only_scales(model, runtime):
    """Prepare the model as tune_scale.py does: only the head scales get gradients."""
    for weight, p in cast_matrices(model, runtime.dtype).named_parameters():
        p.requires_grad_(weight.endswith('head_scale'))
    return model


def random_ids(B, T, runtime):
    return torch.randint(vocab_size, (B, T), device=runtime.device)


def training_step(model, B, T, runtime):
    """
    Returns a function that does one step on random tokens. The step has the parts of a step in
    train.py and tune_scale.py: loss, backward, clipping, optimizer.
    """
    x, y = random_ids(B, T, runtime), random_ids(B, T, runtime)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = compiled(model, runtime, compile)

    def step():
        with runtime.autocast():
            loss = forward(x, y).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def reading_flops(model, T, tail):
    """
    The FLOP to read T tokens and compute the logits of the last `tail` tokens. For the other tokens
    the last layer computes only keys and values. The attention of a query grows with its position.
    """
    (matmul, attention), unread = model.flops_per_token(T), T - tail
    head, block = 2 * model.head.weight.numel(), model.blocks[-1]
    after = block.attn.out.weight.numel() + sum(p.numel() for p in block.mlp.parameters())
    skipped = unread * (2 * after + head) + unread ** 2 / T * attention / n_layer
    return T * (matmul + attention) - skipped


# ---------------------------------------------------------------------- tasks

def train(runtime):
    models, tokens = both(context, runtime), batch_size * context
    works = {who: training_step(model, batch_size, context, runtime)
             for who, model in models.items()}
    flops = 3 * tokens * sum(models['ours'].flops_per_token(context))
    limit = flops / rate(runtime.device, runtime.dtype)
    return measure('training step', works, tokens, limit, runtime)


def step_limits(model, tokens, T, runtime, forwards=1):
    """
    Lower bounds in seconds for a head-scale step ('ours') and for a whole step on windows of T.
    Returns {name: seconds of products with weights}, and the seconds of attention. The unit of the
    count is a forward pass. Each forward counts 1. Gradients for lower layers count 1. Gradients of
    weights count 1, in a whole step only. The backward of attention counts 2.
    """
    matmul, attention = model.flops_per_token(T)
    second = tokens / rate(runtime.device, runtime.dtype)  # for 1 FLOP per token
    linear = {'ours': (forwards + 1) * matmul * second,
              'whole step': (forwards + 2) * matmul * second}
    return linear, (forwards + 2) * attention * second


def scale(runtime):
    """A step of head-scale tuning, compared with a whole training step."""
    model, tokens = new_model(context, runtime), batch_size * context
    tuned = only_scales(new_model(context, runtime), runtime)
    works = {'ours': training_step(tuned, batch_size, context, runtime),
             'whole step': training_step(model, batch_size, context, runtime)}
    linear, quadratic = step_limits(model, tokens, context, runtime)
    limits = {who: seconds + quadratic for who, seconds in linear.items()}
    return measure('head-scale step', works, tokens, limits, runtime)


@torch.no_grad()
def sliding_windows(runtime):
    """
    Batches of windows that score their last L/8 tokens. Our model computes only the logits of these
    tokens; transformers' code computes all logits. Each model runs compiled and uncompiled.
    """
    n, scored, works = 4 * batch_size, -(-context // 8), {}
    batches = random_ids(n, context + 1, runtime).split(batch_size)

    def read_all(model):
        for batch in batches:
            model(batch[:, :-1], batch[:, -scored:])

    models = both(context, runtime, frozen=True)
    for who, model in models.items():
        works[who] = partial(read_all, compiled(model, runtime, compile))
        works[f'{who}, uncompiled'] = partial(read_all, model)
    flops = n * reading_flops(models['ours'], context, scored)
    limit = flops / rate(runtime.device, runtime.dtype)
    return measure('sliding windows', works, n * context, limit, runtime)


def entropy(runtime):
    """Entropy of every head of a layer, by the kernel and by the float32 matrix, in place."""
    T, D = read_context, n_embd // n_head
    q = torch.randn(1, n_head, T, D, device=runtime.device)
    k = q[:, :n_kv_head].contiguous()
    later = torch.full((T, T), -1e9, device=runtime.device).triu(1)  # exp(-1e9) is 0

    def matrix():
        scores = q @ kernels.repeat_heads(k, n_head).transpose(-1, -2)
        scores.mul_(D ** -0.5).add_(later)
        log_a = scores.sub_(scores.logsumexp(-1, keepdim=True))
        return -log_a.exp().mul_(log_a).sum(-1)

    works = {'ours': partial(kernels.entropy, q, k), 'matrix': matrix}
    flops = 2 * n_embd * T ** 2  # q.k and the sum over keys, for half of the pairs
    limit = flops / rate(runtime.device, torch.float32)
    return measure(f'entropy, T = {T}', works, T, limit, runtime)


def read(model, idx):
    """Prefill. Returns the cache, with room for n_decode more tokens, and the first new token."""
    cache = new_cache(model, 1, read_context + n_decode)
    logits = model(idx, tail=1, cache=cache)
    return cache, logits[:, -1].argmax(-1, keepdim=True)


@torch.no_grad()
def prefill(runtime):
    models, idx = both(read_context, runtime, frozen=True), random_ids(1, read_context, runtime)
    works = {who: partial(read, model, idx) for who, model in models.items()}
    limit = reading_flops(models['ours'], read_context, 1) / rate(runtime.device, runtime.dtype)
    return measure(f'prefill, T = {read_context}', works, read_context, limit, runtime)


@torch.no_grad()
def decode(runtime):
    """
    Greedy decoding of tokens one by one, after read_context tokens. `compiled` uses one graph that
    is compiled for all steps. The pass over the prompt is not counted.
    """
    models, idx = both(read_context, runtime, frozen=True), random_ids(1, read_context, runtime)
    ours = models['ours']
    store_column_major(ours)  # stages that decode do the same

    def decoding(model, compile=False):
        cache, first = read(model, idx)
        step = step_of(model, cache, compile)

        def work():
            token = first
            for _ in range(n_decode):
                token = step(token, tail=1, cache=cache)[:, -1].argmax(-1, keepdim=True)
            if model is ours:  # cut the cache back to the prompt
                cache.length -= n_decode
            else:
                cache.crop(-n_decode)
        return work

    works = {who: decoding(model) for who, model in models.items()}
    if can_compile(runtime, compile) and not needs_equal_lengths(ours):
        works['compiled'] = decoding(ours, True)
    weights = ours.n_params() - ours.embed.weight.numel()
    keys = 2 * n_layer * n_kv_head * (n_embd // n_head) * (read_context + n_decode / 2)
    x = torch.ones(2 ** 26, device=runtime.device)  # 256 MB, to measure memory bandwidth
    bandwidth = 4 * x.numel() / medians({'sum': x.sum}, runtime)['sum']
    limit = n_decode * runtime.dtype.itemsize * (weights + keys) / bandwidth
    return measure(f'decode, T = {read_context}', works, n_decode, limit, runtime)


TASKS = {'train': train, 'scale': scale, 'eval': sliding_windows, 'entropy': entropy,
         'prefill': prefill, 'decode': decode}


# ---------------------------------------------------------------------- a run

def read_like(given):
    """Set the settings of the model from the configs in `like`, but keep those the user gave."""
    values = {'position': 'none'}
    for config in like:
        values |= run_config(config)
    if 'n_layer' not in values:
        raise UserError(f'like is {like}, which sets no n_layer. Give the config that trains the '
                        'model.')
    values['context'] = values.get('block_size', context)
    own = settings(globals()).keys() & {*MODEL, 'context'}
    for setting in values.keys() & own - set(given):
        globals()[setting] = values[setting]


def check_settings(runtime):
    if not set(tasks) <= set(TASKS):
        raise UserError(f"tasks is {tasks}. Choose from: {', '.join(TASKS)}.")
    if peer not in ('', 'hf'):
        raise UserError(f"peer is '{peer}'. Choose hf, or leave it empty.")
    if runtime.world_size > 1:
        raise UserError('bench.py measures only one device. Start it without torchrun.')
    between(globals(), 1, 'context', 'batch_size', 'read_context', 'n_decode', 'rounds')


def main(given=(), works=None, default_name=''):
    """
    Measure each function of works, {name: function of a Runtime}, and write the results. given: the
    names of the settings that the user gave; default_name: of the result, if `name` is empty.
    """
    began, runtime = time.perf_counter(), setup(device, dtype, seed)
    check_settings(runtime)
    if like:
        read_like(given)
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # else each profile prints a message
    flops = rate(runtime.device, runtime.dtype)
    print(f'{runtime.device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, '
          f'{runtime.dtype}: a large matrix product does {flops / 1e12:.2f} TFLOP/s')

    works = works or {task: TASKS[task] for task in tasks}
    results = {task: work(runtime) for task, work in works.items()}
    result = {'stage': 'bench', 'matmul_flops': flops, 'results': results}
    path = result_path(out_dir, name or default_name or runtime.device.type)
    plots.write_result(path, result, settings(globals()), runtime, began)


if __name__ == '__main__':
    main(configure(globals(), methods.Settings))
