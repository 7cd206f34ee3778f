"""The reader's load stays small: walk.py counts it."""

from walk import crossed, imported


def test_a_main_stage_imports_few_files():
    for stages, most_files, most_tokens in ((['train'], 7, 13_600),
                                            (['train', 'tune_scale', 'eval_ppl'], 11, 21_500)):
        files = imported(*stages)
        assert len(files) <= most_files and sum(files.values()) <= most_tokens, files


def test_few_functions_lie_between_main_and_attention():
    before, step = crossed()
    assert len(before) <= 34 and len(step) <= 14, (before, step)
