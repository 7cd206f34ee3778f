# Table 4's ablations of head-scale tuning on the small passkey model: perplexity. results/ablation_passkey/run.sh has
# the tuning and the passkey side.
out_dir = 'out/passkey/ablation'
dataset = 'stdlib_bpe'
lengths = [256, 512, 768]
max_windows = 256
_nope = 'out/passkey/nope/last.pt'
table = [{'name': 'NoPE', 'init_from': _nope},
         {'name': 'NoPE, uniform scale (grid)', 'init_from': _nope, 'scale': [1.0, 1.2, 1.4, 1.6]}]
for _name, _label in (('head scale', 'full'), ('without concentration constraint', 'no_min'),
                      ('without initialization', 'from_1')):
    table.append({'name': _name, 'init_from': _nope, 'scale': f'out/passkey/nope/scale_head_768_{_label}.json'})
