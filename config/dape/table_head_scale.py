# Head scales tuned on top of other position methods: first the commands in results/dape_small/run.sh
# python eval_ppl.py config/dape/table_head_scale.py
out_dir = 'out/dape'
label = 'head_scale'
protocol = 'last'
lengths = [128, 256, 512, 1024, 2048]  # tuned at 512
n_samples = 96
batch_tokens = 16384
table = []
for _run, _name in (('none', 'NoPE'), ('rope', 'RoPE + YaRN'), ('alibi', 'ALiBi'), ('kerple', 'Kerple')):
    _row = {'name': _name, 'init_from': f'out/dape/{_run}/last.pt'}
    if _run == 'rope':
        _row['rope_scaling'] = 'yarn:4'
    table += [_row, _row | {'name': f'{_name}, head scale', 'scale': f'out/dape/{_run}/scale_head_512.json'}]
