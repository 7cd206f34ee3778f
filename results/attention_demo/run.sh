# What one head sees past L, after results/demo_bytes/run.sh
python -m extras.attention_maps --lengths=[128,512,2048]
