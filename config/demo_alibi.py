# the demo model's twin with ALiBi: train.py's defaults in everything else
out_dir = 'out/demo/alibi'
position = 'alibi'
