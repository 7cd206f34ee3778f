"""
Decoding, against repeated full forward passes and probabilities worked out by hand; and sample.py.

$ python -m pytest tests/test_generate.py
"""

import pytest
import torch
from conftest import EVERY, mistake, near, random_model, stage_here

from lib import checkpoints
from lib.generate import complete, generate, new_cache, sample_token, store_by_column
from lib.huggingface import save_folder
from lib.tokens import get_tokenizer, tokenizer_state

P = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])  # of five tokens
ALL = [0, 1, 2, 3, 4]


def tokens(*shape):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(1))


def frequencies(**settings):
    """How often each of the five tokens is drawn."""
    logits, generator = P.log().expand(20_000, 5), torch.Generator().manual_seed(0)
    drawn = sample_token(logits, generator=generator, **settings)
    return torch.bincount(drawn[:, 0], minlength=5) / 20_000


# ---------------------------------------------------------------------- one token

@pytest.mark.parametrize('settings', [dict(temperature=0), dict(top_k=1)], ids=str)
def test_temperature_0_and_top_k_1_take_the_likeliest_and_the_first_of_equals(settings):
    logits = torch.randn(8, 50)
    logits[:2, 7:9] = 9.0
    assert torch.equal(sample_token(logits, **settings), logits.argmax(-1, keepdim=True))


@pytest.mark.parametrize('settings, kept', [
    (dict(temperature=0.5), ALL), (dict(temperature=2.0), ALL),
    (dict(top_k=2), [1, 3]), (dict(top_k=9), ALL),
    # cumulative mass, likeliest first: 0.4, 0.65, 0.85, 0.95, 1
    (dict(top_p=0.01), [1]), (dict(top_p=0.64), [1, 3]), (dict(top_p=0.66), [1, 3, 4]),
    # top-p reads what top-k left: 0.4 / 0.65 = 0.615 and 1
    (dict(top_k=2, top_p=0.6), [1]), (dict(top_k=2, top_p=0.62), [1, 3]),
    # squared and renormalised: 0.587, 0.817, 0.963 ...
    (dict(temperature=0.5, top_p=0.58), [1]), (dict(temperature=0.5, top_p=0.6), [1, 3]),
], ids=str)
def test_top_k_and_top_p_keep_exactly_the_right_tokens_in_proportion(settings, kept):
    drawn, expected = frequencies(**settings), torch.zeros(5)
    assert drawn.nonzero()[:, 0].tolist() == kept
    expected[kept] = P[kept] ** (1 / settings.get('temperature', 1.0))
    near(drawn, expected / expected.sum(), atol=0.015)


def test_top_p_judges_each_sequence_by_its_own_probabilities():
    flat, sharp = torch.full((5,), 0.2), torch.tensor([0.01, 0.01, 0.96, 0.01, 0.01])
    drawn = sample_token(torch.stack([flat, sharp]).log().repeat(500, 1), top_p=0.95)[:, 0]
    assert len(drawn[0::2].unique()) == 5 and drawn[1::2].unique().tolist() == [2]


# ---------------------------------------------------------------------- many tokens

@pytest.mark.parametrize('position', ['none', 'rope'])
@torch.no_grad()
def test_greedy_equals_argmax_of_repeated_full_forwards(position):
    model, start = random_model(position=position), tokens(1, 20)
    idx = start
    for _ in range(40):  # past block_size
        idx = torch.cat((idx, model(idx)[:, -1].argmax(-1, keepdim=True)), dim=1)
    prompt, expected = start[0].tolist(), idx[0, 20:].tolist()
    assert list(generate(model, prompt, 40)) == complete(model, [prompt], 40)[0] == expected
    first = expected.index(expected[4])
    assert list(generate(model, prompt, 40, eos=expected[4])) == expected[:first]


def test_generation_reads_each_token_once_and_computes_the_last_logits_only():
    model, seen = random_model(), []
    model.embed.register_forward_hook(lambda embed, inputs, x: seen.append(('read', x.shape[1])))
    model.head.register_forward_hook(lambda head, inputs, x: seen.append(('logits', x.shape[1])))
    list(generate(model, list(range(20)), 3))
    assert seen == [('read', 20), ('logits', 1)] + 2 * [('read', 1), ('logits', 1)]


def test_cache_that_is_too_short_says_so():
    model = random_model()
    cache = new_cache(model, 1, 10)
    model(tokens(1, 8), cache=cache)
    with pytest.raises(ValueError, match='KV cache holds 10'):
        model(tokens(1, 3), cache=cache)


def test_storing_matrices_by_column_changes_no_value_and_is_done_once():
    model = random_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    store_by_column(model)
    places = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
    store_by_column(model)
    for name, weight in model.state_dict().items():
        assert weight.equal(before[name]) and weight.data_ptr() == places[name], name
    assert model.head.weight.stride() == (1, model.config.vocab_size)


# ---------------------------------------------------------------------- completions

def by_transformers(theirs, prompt, n, beams, eos):
    """What Hugging Face's generate() makes of a prompt, up to an end token."""
    idx = torch.tensor([prompt])
    out = theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=n,
                          num_beams=beams, do_sample=False, eos_token_id=list(eos) or None,
                          pad_token_id=0)[0, len(prompt):].tolist()
    ends = [i for i, token in enumerate(out) if token in eos]
    return out[:ends[0]] if ends else out


@pytest.mark.parametrize('position, beams', [('none', 1), ('none', 5), ('rope', 2)])
def test_completions_equal_those_of_transformers(tmp_path, position, beams):
    transformers = pytest.importorskip('transformers')
    model = random_model(position=position, vocab_size=257)
    model.head.weight.data *= 4  # so that continuations differ in likelihood
    save_folder(tmp_path, model, tokenizer_state(get_tokenizer('bytes')), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation='eager').eval()
    generator, n_ended = torch.Generator().manual_seed(3), 0
    for eos in (), (256,), tuple(range(0, 257, 9)):  # never, rarely and soon at an end
        prompts = [torch.randint(257, (n,), generator=generator).tolist() for n in (1, 7, 31)]
        ours = complete(model, prompts, 12, beams, eos)
        assert ours == [by_transformers(theirs, one, 12, beams, eos) for one in prompts]
        n_ended += sum(len(new) < 12 for new in ours)
    assert n_ended > 0


@pytest.mark.parametrize('beams', [1, 3])
@pytest.mark.parametrize('changes', EVERY, ids=str)
def test_a_batch_of_unequal_prompts_completes_as_each_would_alone(changes, beams):
    model = random_model(**changes)
    model.head.weight.data *= 4
    prompts = [tokens(n).tolist() for n in (40, 3, 17, 40)]
    together = complete(model, prompts, 10, beams, eos=(5, 6, 7))
    assert together == [complete(model, [one], 10, beams, eos=(5, 6, 7))[0] for one in prompts]


@pytest.mark.parametrize('beams', [1, 3])
def test_completions_end_at_a_stop_and_not_before_their_minimum(beams):
    model, prompt = random_model(), [3, 1, 4, 1, 5]
    eos = complete(model, [prompt], 12)[0][:1]
    assert beams > 1 or complete(model, [prompt], 12, eos=eos)[0] == []
    later = complete(model, [prompt], 12, beams, eos, min_new_tokens=3)[0]
    assert len(later) >= 3 and eos[0] not in later[:3]
    assert complete(model, [prompt, prompt], 0, beams) == [[], []]


def test_beam_search_reads_the_prompt_once_and_then_one_token_a_beam():
    model, read = random_model(), []
    model.embed.register_forward_hook(lambda embed, inputs, x: read.append(inputs[0].shape))
    complete(model, [[1, 2, 3], [4]], 4, beams=3)
    assert read == [(2, 3), (6, 1), (6, 1), (6, 1)]


# ---------------------------------------------------------------------- sample.py

def sample(folder, *arguments):
    return stage_here('sample', f'--out_dir={folder}', '--device=cpu', '--dtype=float32',
                      *arguments)


def test_sample_prints_the_prompt_and_goes_on(tiny_run):
    prompt = '--prompt=def naïve('
    out = sample(tiny_run, prompt, '--max_new_tokens=40', '--n_samples=2', '--seed=3')
    one, two = out.split('\n---\n')
    assert one.startswith('def naïve(') and two.startswith('def naïve(') and one != two
    assert 10 + 10 < len(one) <= 10 + 40  # of 40 bytes; some may be bytes of one character
    assert sample(tiny_run, prompt, '--max_new_tokens=0') == 'def naïve(\n'


def save_reciter(path, encoding, recited):
    """
    A checkpoint of a model that recites tokens, none of which comes twice: attention and MLP are 0,
    the embedding of a token is a one-hot vector, and the output matrix sends it to the next token.
    """
    assert len(set(recited[:-1])) == len(recited) - 1, 'a token comes twice'
    model = random_model(vocab_size=encoding.n_vocab, n_embd=264)
    for p in model.parameters():
        p.data.fill_(0 if p.dim() == 2 else 1)
    for i, (token, following) in enumerate(zip(recited, recited[1:])):
        model.embed.weight.data[token, i] = 1
        model.head.weight.data[following, i] = 1
    state = checkpoints.checkpoint_state(model, tokenizer_state(encoding), step=0, settings={})
    checkpoints.save(path, **state)


def test_characters_of_several_bytes_are_printed_whole_and_broken_ones_marked(tmp_path):
    encoding, broken = get_tokenizer('bytes'), '東'.encode()[:2]
    recited = 'Zoë→🙂'.encode() + broken + b'a' + 'ʼn'.encode()[:1]  # broken inside, and at the end
    eot = encoding.eot_token
    save_reciter(tmp_path / 'last.pt', encoding, [eot, *recited, eot])
    assert sample(tmp_path, '--temperature=0', '--max_new_tokens=99') == 'Zoë→🙂�a�\n'


def test_words_of_a_hugging_face_tokenizer_keep_the_spaces_before_them(tmp_path):
    tokenizers = pytest.importorskip('tokenizers')
    vocab = {'<unk>': 0, '<s>': 1, '</s>': 2, '▁a': 3, '▁b': 4, '▁c': 5}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token='<unk>'))
    words.add_special_tokens(['<s>', '</s>'])
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()
    words.save(str(tmp_path / 'tokenizer.json'))
    encoding = get_tokenizer(str(tmp_path / 'tokenizer.json'))
    save_reciter(tmp_path / 'last.pt', encoding, [3, 4, 5, encoding.eot_token])
    assert sample(tmp_path, '--temperature=0', '--prompt=a') == 'a b c\n'


def test_sample_of_a_run_that_does_not_exist_is_refused(tmp_path):
    assert 'last.pt' in mistake('sample', f'--out_dir={tmp_path}')
