# make look: the demo with the trained models of this repository, which were tuned at 8L = 1,024
out_dir = 'out/look'
models = 'lessons/models'
dataset = ''
lengths = [128, 256, 512, 1024]
