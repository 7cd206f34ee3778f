"""
Text from a model, one token at a time over a KV cache: greedy, or sampled with temperature, top-k and top-p.
Plain PyTorch; imports nothing of the project.
"""

import torch


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """
    Draw the next token. logits: (B, V). Returns (B, 1) ids.
    temperature: 0 takes the likeliest; top_k: only the k likeliest; top_p: only the fewest whose mass reaches p.
    Raises ValueError for a temperature below 0, top_k below 1, or top_p not in (0, 1].
    """
    if temperature < 0 or top_k is not None and top_k < 1 or top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f'temperature {temperature}, top_k {top_k}, top_p {top_p}: temperature must be 0 or more, '
                         'top_k 1 or more, top_p above 0 and at most 1.')
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        kept = logits.argsort(descending=True, stable=True)[:, :top_k]  # among equals the first, as argmax
        logits = torch.full_like(logits, float('-inf')).scatter(-1, kept, logits.gather(-1, kept))
    if top_p is not None:
        ordered, order = logits.softmax(-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered  # mass of the tokens likelier than this one: 0 for the first, so it stays
        logits = logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), float('-inf'))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@torch.no_grad()
def generate(model, prompt, max_new_tokens, temperature=0.0, top_k=None, top_p=None, eos=None, generator=None,
             cache_dtype=None):
    """
    Yield (B, 1) next tokens, at most max_new_tokens of them; stop after every sequence has produced `eos`.
    prompt: (B, T) ids, T >= 1. The prompt is read in one pass that computes logits for its last position only.
    Raises ValueError for an empty prompt.
    """
    B, T = prompt.shape
    if T == 0:
        raise ValueError('the prompt is empty: give at least one token, such as the end-of-text token.')
    cache = model.new_cache(B, T + max_new_tokens, cache_dtype)
    ended = torch.zeros(B, 1, dtype=torch.bool, device=prompt.device)
    token = prompt
    for _ in range(max_new_tokens):
        logits = model(token, last=1, cache=cache)[:, -1]  # (B, V)
        token = sample_token(logits, temperature, top_k, top_p, generator)
        if eos is not None:
            token = token.masked_fill(ended, eos)  # a sequence that has ended stays ended
            ended |= token == eos
        yield token
        if eos is not None and ended.all():
            return
