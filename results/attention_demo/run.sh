# What results/attention_demo shows, after results/demo_bytes/run.sh. Run it from the project's root.
python attention_maps.py --lengths=[128,512,2048]
