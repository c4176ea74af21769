"""What a new user types at `meshwright plan`: exit code, call, and the word that has to be in what is printed."""

CALLS = """
0 | plan tiny --on cpu:8 --batch 16                                        | next
0 | plan TINY --on CPU:8 --batch 16                                        | tiny · train
0 | plan tiny --on cpu:8 --batch-tokens 4Ki --seq-len 256                  | 16 × 256 tokens
0 | plan tiny --on cpu:8 --batch-tokens 4k --seq-len 250                   | 16 × 250 tokens
0 | plan tiny --on=cpu:8 --batch=16 --seq-len=1Ki                          | 16 × 1,024 tokens
0 | plan tiny --on cpu:8 --batch 16 --seq_len 128                          | 16 × 128 tokens
0 | plan tiny --on cpu:8 --batch 16 --mesh 1,-1,4,1                        | asked for
0 | plan tiny --on cpu:8 --batch 16 --mesh -1,2,4,1                        | asked for
0 | plan tiny --on cpu:8 --batch 16 --mesh-dim fsdp=8                      | asked for
0 | plan tiny --on cpu:8 --batch 16 --compare dp=8 fsdp=8                  | loses because
0 | plan tiny --on cpu:8 --batch 16 --sweep chips=4..16                    | sweep over chips
0 | plan tiny --on cpu:8 --sweep batch=8,16 --seq-len 64                   | sweep over batch
0 | plan tiny --on cpu:8 --batch 16 --sweep seq-len=64..256                | sweep over seq_len
0 | plan tiny --on cpu:8 --batch 16 --ops                                  | ops of a step
0 | plan tiny --on cpu:8 --batch 16 --json                                 | candidates
0 | plan tiny --on cpu:8 --batch 16 --json --top 1                         | candidates
0 | plan tiny --on cpu:8 --batch 16 -o out.yaml                            | meshwright verify out.yaml
0 | plan tiny --on cpu:8 --batch 16 -o out.json                            | meshwright verify out.json
0 | plan tiny --on cpu:8 --batch 16 -o /dev/null                           | tiny · train
0 | plan tiny --on cpu:8 --batch 16 --remat auto                           | tiny · train
0 | plan tiny --on cpu:8 --batch 16 --num-layers 1                         | tiny · train
0 | plan tiny --on mine:8 --batch 16 --hardware mine.toml                  | mine:8
0 | plan plan.yaml                                                         | meshwright verify plan.yaml
0 | plan plan.yaml --ops                                                   | ops of a step
0 | plan plan.yaml --json                                                  | meshwright_plan
0 | plan plan.yaml --tokens 1T --price 2                                   | which cost
2 | plan plan.yaml --on cpu:8                                              | --on has no effect with plan.yaml
2 | plan plan.yaml --json --ops                                            | --ops has no effect with plan.yaml
2 | plan plan.yaml --compare dp=8                                          | --compare has no effect with plan.yaml
2 | plan plan.yaml --serve decode --on cpu:8                               | plan.yaml is YAML, and no config.json
2 | plan serve.yaml                                                        | is a plan to serve
2 | plan cut.yaml                                                          | cut.yaml
2 | plan none.yaml                                                         | no plan 'none.yaml'
2 | plan run                                                               | run/config.json is not the config of a run
0 | plan short.json --on cpu:8 --batch 16 --seq-len 128 --mesh tp=8        | was trained on 64 tokens
0 | plan short.json --on cpu:8 --batch 16 --seq-len 128 --compare tp=8 dp=8 | was trained on 64 tokens
0 | plan good --on cpu:8 --batch 16                                        | good · train
0 | plan short.json --on cpu:8 --batch 16 --seq-len 128                    | was trained on 64 tokens
0 | plan good/config.json --on cpu:8 --batch 16                            | good · train
0 | plan llama3-8b --on v5p-128 --batch 128                                | 128 TensorCores in 64 chips
0 | plan llama3-8b --on v6e-64 --batch 64                                  | v6e:8x8
0 | plan llama3-8b --on v5litepod-64 --batch 64                            | v5e:8x8
0 | plan llama3-8b --on 2*v5e:8x8 --batch 128                              | 2*v5e:8x8
0 | plan ResNet18 --on a100-80gb:8 --batch 256 --compiled 0                | images:0, labels:0
0 | plan tiny --on cpu:8 --serve decode                                    | tok/s
0 | plan tiny --on cpu:8 --serve prefill --prompt-len 64                   | tok/s
0 | plan tiny --on cpu:8 --serve decode --json                             | frontier
0 | plan tiny --help                                                       | usage
0 | help plan                                                              | usage
0 | help                                                                   | exit codes
0 | --help                                                                 | exit codes
0 | -h                                                                     | exit codes
0 | --version                                                              | meshwright
0 | -V                                                                     | meshwright
0 | version                                                                | meshwright
1 | plan llama3-405b --on h100:8 --serve decode                            | DOES NOT FIT
1 | plan llama3-8b --on v5e:2x2 --batch 8 --num-layers 16                  | DOES NOT FIT
1 | plan llama3-8b --on v5e:2x2 --batch 8 --num-layers 16 --json           | fixes
1 | plan llama3-8b --on v5e:2x2 --batch 8 --compare fsdp=4                 | none fits
1 | plan tiny --on cpu:8 --serve decode --latency 1us                      | TOO LATE
2 |                                                                        |
2 | plan                                                                   | MODEL is missing
2 | plan tiny                                                              | --on
2 | plan tiny --on cpu:8                                                   | --batch
2 | plan tiny --batch 16                                                   | --on
2 | plan '' --on cpu:8 --batch 16                                          | MODEL is empty
2 | plan tiny tiny --on cpu:8 --batch 16                                   | no place for 'tiny'
2 | plan tinny --on cpu:8 --batch 16                                       | did you mean tiny
2 | plan llama --on cpu:8 --batch 16                                       | did you mean llama2-7b, llama3-8b or
2 | plan zzzz --on cpu:8 --batch 16                                        | no model 'zzzz'; `meshwright help models` lists
2 | plan tiny --on v2-8 --batch 16                                         | did you mean v3, v4 or v5p?
0 | plan tiny --on cpu:1 --batch 1                                         | (1 device of
2 | plan tiny --on cpu:8 --batch 16 --mesh fsdp=8 --objective dpo --reference precomputed --reference-mesh fsdp=8 | reference_mesh='fsdp=8' would have no effect
2 | plan llama3-8B-instruct --on cpu:8 --batch 16                          | did you mean llama3-8b
2 | plan resnet51 --on cpu:8 --batch 16                                    | resnet50
2 | plam tiny --on cpu:8 --batch 16                                        | did you mean plan
2 | plan tiny --on cpu:8 --batch 16 --batch 16                             | --batch is given twice
2 | plan tiny --on cpu:8 --on cpu:8 --batch 16                             | --on is given twice
2 | plan tiny --on cpu:8 --batch 16 --json --json                          | --json is given twice
2 | plan tiny --on cpu:8 --batch 16 -o a.yaml --output b.yaml              | --output is given twice
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=8 --mesh-dim dp=8            | --mesh is given twice
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=4 --sweep chips=8        | --sweep is given twice
2 | plan tiny --on cpu:8 --batch                                           | --batch needs a value
2 | plan tiny --on cpu:8 --batch ''                                        | --batch needs a value
2 | plan tiny --on cpu:8 --batch 16 --mesh ''                              | --mesh needs a value
2 | plan tiny --on cpu:8 --batch 16 --mesh                                 | --mesh needs a value
2 | plan tiny --on cpu:8 --batch 16 --compare                              | --compare needs a value
2 | plan tiny --on cpu:8 --batch 16 --compare ''                           | --compare needs a value
2 | plan tiny --on cpu:8 --batch 16 --output ''                            | --output needs a value
2 | plan tiny --on '' --batch 16                                           | --on needs a value
2 | plan tiny --on cpu:8 --batch 16 --json=yes                             | --json takes no value
2 | plan tiny --on cpu:8 --batch 0                                         | whole number from 1
2 | plan tiny --on cpu:8 --batch -1                                        | whole number from 1
2 | plan tiny --on cpu:8 --batch 1.5                                       | whole number from 1
2 | plan tiny --on cpu:8 --batch nan                                       | whole number from 1
2 | plan tiny --on cpu:8 --batch 1e3                                       | whole number from 1
2 | plan tiny --on cpu:8 --batch x                                         | whole number from 1
2 | plan tiny --on cpu:8 --batch 16k16                                     | whole number from 1
2 | plan tiny --on cpu:8 --batch 99999999999999999999999                   | the most is
2 | plan tiny --on cpu:8 --batch 2G                                        | the most is
2 | plan tiny --on cpu:8 --batch 16 --seq-len 0                            | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --seq-len -5                           | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --seq-len 99999999999999               | the most is
2 | plan tiny --on cpu:8 --batch 16 --num-layers 0                         | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --num-layers 100000000                 | the most is
2 | plan tiny --on cpu:8 --batch 16 --top 0                                | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --top -3                               | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --num-microbatches 0                   | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --num-microbatches 7                   | multiple of 7
2 | plan tiny --on cpu:8 --batch 16 --batch-tokens 4k                      | one of --batch
2 | plan tiny --on cpu:8 --batch-tokens 4M                                 | 2048
2 | plan tiny --on cpu:8 --batch 12 --mesh dp=8                            | batch 12
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=3                            | needs 3 devices
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=-1,tp=-1                     | only one degree
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=0                            | degree
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=two                          | degree
2 | plan tiny --on cpu:8 --batch 16 --mesh model=8                         | the axes are
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=2,dp=4                       | twice
2 | plan tiny --on cpu:8 --batch 16 --mesh 1,2,4                           | 3 entries
2 | plan tiny --on cpu:8 --batch 16 --mesh tp=8 --seq-len 63               | 63
2 | plan tiny --on cpu:8 --batch 16 --mesh pp=8                            | pp=8
2 | plan tiny --on cpu:8 --batch 16 --mesh ep=8                            | ep=8
2 | plan tiny --on cpu:8 --batch 16 --mesh ,                               | entries
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=8,                           | axis ''
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=99999999999999999999         | devices
2 | plan tiny --on cpu --batch 16                                          | a chip and a shape or count
2 | plan tiny --on :8 --batch 16                                           | a chip and a shape or count
2 | plan tiny --on cpu: --batch 16                                         | a chip and a shape or count
2 | plan tiny --on cpu:0 --batch 16                                        | size 0
2 | plan tiny --on cpu:-8 --batch 16                                       | a chip and a shape or count
2 | plan tiny --on cpu:8x8 --batch 16                                      | number of devices
2 | plan tiny --on v9:8 --batch 16                                         | chip 'v9' is not known
2 | plan tiny --on v5p:4x4 --batch 16                                      | has 2 axes
2 | plan tiny --on v5e:3x3 --batch 16                                      | not a slice
2 | plan tiny --on v5e:17 --batch 16                                       | nearest have 16
2 | plan tiny --on v5e:32x32 --batch 16                                    | 2*v5e:16x16
2 | plan tiny --on 2xv5e:4x4 --batch 16                                    | 2*v5e:4x4
2 | plan tiny --on 0*v5e:4x4 --batch 16                                    | size 0
2 | plan tiny --on 2*h100:8 --batch 16                                     | number of devices
2 | plan tiny --on h100:13 --batch 13                                      | evenly
2 | plan tiny --on h100:999999999999999999 --batch 16                      | the most is
2 | plan tiny --on h100:1000000007 --batch 16                              | the most is
2 | plan tiny --on v5p-7 --batch 16                                        | no whole chips
2 | plan tiny --on v5p-0 --batch 16                                        | size 0
2 | plan tiny --on v5p-6 --batch 16                                        | not a slice
2 | plan tiny --on mine:8 --batch 16                                       | chip 'mine' is not known
2 | plan tiny --on cpu:8 --batch 16 --hardware mine.toml                   | describes mine
2 | plan tiny --on mine:8 --batch 16 --hardware none.toml                  | cannot read hardware file
2 | plan tiny --on mine:8 --batch 16 --hardware bad.toml                   | bad.toml
2 | plan tiny --on mine:8 --batch 16 --hardware dir                        | cannot read hardware file
2 | plan tiny --on mine:8 --batch 16 --hardware bytes                      | is not TOML
2 | plan tiny --on cpu:8 --batch 16 --remat all                            | it is one of
2 | plan tiny --on cpu:8 --batch 16 --remat None                           | did you mean none
2 | plan tiny --on cpu:8 --batch 16 --optimizer adam                       | did you mean adamw
2 | plan tiny --on cpu:8 --batch 16 --attention splash                     | it is one of
2 | plan tiny --on cpu:8 --batch 16 --zero-stage 4                         | it is one of
2 | plan tiny --on cpu:8 --batch 16 --dtype f64                            | it is one of
2 | plan tiny --on cpu:8 --batch 16 --bacth 16                             | did you mean --batch
2 | plan tiny --on cpu:8 --batch 16 -x                                     | no option -x
2 | plan tiny --on cpu:8 --batch 16 -ofile                                 | no option
2 | plan tiny --on cpu:8 --batch 16 --                                     | no option
2 | plan tiny --on cpu:8 --batch 16 --compute-dtype bf16                   | is now --dtype
2 | plan tiny --on cpu:8 --batch 16 --latency 30ms                         | option of a serving plan
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=4..16 --mesh dp=8        | --mesh has no effect with --sweep
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=4..16 --compare dp=8     | --compare has no effect with --sweep
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=4..16 --top 3            | --top has no effect with --sweep
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=4..16 --ops              | --ops has no effect with --sweep
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=4..16 -o a.yaml          | --output has no effect with --sweep
2 | plan tiny --on cpu:8 --batch 16 --sweep batch=8,16                     | --batch has no effect with --sweep
2 | plan tiny --on cpu:8 --batch 16 --sweep seq-len=64,128 --seq-len 64    | --seq-len has no effect with --sweep
2 | plan tiny --on cpu:8 --batch-tokens 4k --sweep seq-len=64,128          | needs --batch
2 | plan tiny --on cpu:8 --batch 16 --compare dp=8 --mesh dp=8             | --mesh has no effect with --compare
2 | plan tiny --on cpu:8 --batch 16 --compare dp=8 --top 3                 | --top has no effect with --compare
2 | plan tiny --on cpu:8 --batch 16 --compare dp=8 8,1,1,1                 | twice
2 | plan tiny --on cpu:8 --batch 16 --compare dp=8 -o a.yaml               | --output has no effect with --compare
2 | plan tiny --on cpu:8 --batch 16 --sweep chips                          | as chips=64..1024
2 | plan tiny --on cpu:8 --batch 16 --sweep layers=1,2                     | as chips=64..1024
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=                         | as chips=64..1024
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=16..4                    | no values
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=0,4                      | no values
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=a..b                     | whole number
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=3,5                      | no value of --sweep can be planned
2 | plan tiny --on cpu:8 --batch 16 -o none/x.yaml                         | there is no directory none
2 | plan tiny --on cpu:8 --batch 16 -o dir                                 | is a directory
2 | plan tiny --on cpu:8 --batch 16 -o empty/x                             | is not a directory
2 | plan tiny --on cpu:8 --batch 16 -o LONG                                | name is too long
2 | plan tiny --on cpu:8 --batch 16 --plot none/x.svg                      | none
2 | plan tiny --on cpu:8 --batch 16 --plot x.txt                           | x.txt
2 | plan plan.yaml --on cpu:8 --batch 16                                   | plan.yaml
2 | plan empty --on cpu:8 --batch 16                                       | is not JSON
2 | plan dir --on cpu:8 --batch 16                                         | dir
2 | plan bytes --on cpu:8 --batch 16                                       | is not JSON
2 | plan cut.json --on cpu:8 --batch 16                                    | is not JSON
2 | plan list.json --on cpu:8 --batch 16                                   | holds a list
2 | plan null.json --on cpu:8 --batch 16                                   | holds a
2 | plan deep.json --on cpu:8 --batch 16                                   | deep
2 | plan meta-llama/Llama-3.1-8B --on cpu:8 --batch 16                     | no model
2 | plan tiny --on cpu:8 --serve                                           | --serve needs a value
2 | plan tiny --on cpu:8 --serve train                                     | it is one of
2 | plan tiny --serve decode                                               | --on
2 | plan tiny --on cpu:8 --serve decode --latency 30                       | not a time
2 | plan tiny --on cpu:8 --serve decode --latency -1ms                     | not a time
2 | plan tiny --on cpu:8 --serve decode --latency 0ms                      | not a time
2 | plan tiny --on cpu:8 --serve decode --latency nan                      | not a time
2 | plan tiny --on cpu:8 --serve decode --prompt-len 0                     | whole number from 1
2 | plan tiny --on cpu:8 --serve decode --output-len 0                     | whole number from 1
2 | plan tiny --on cpu:8 --serve prefill --output-len 8                    | --output-len has no effect
2 | plan tiny --on cpu:8 --serve decode --weight-dtype int3                | not known
2 | plan tiny --on cpu:8 --serve decode --top 3 --json                     | --top has no effect with --json
2 | plan tiny --on cpu:8 --serve decode --seq-len 64                       | --prompt-len
2 | plan tiny --on cpu:8 --serve decode --mesh pp=8                        | no pipeline
2 | plan resnet50 --on a100-80gb:8                                         | --batch
2 | plan resnet50 --on a100-80gb:8 --batch 256 --seq-len 64                | option of a training plan
2 | plan programs:make --on cpu:8 --batch 8                                | --batch has no effect with programs:make
2 | fly                                                                    | no command 'fly'
2 | PLAN tiny                                                              | no command 'PLAN'
0 | plan tiny --on cpu:8 --batch 16,000 --seq-len 64                       | 16,000 × 64 tokens
0 | plan tiny --on cpu:8 --batch 0.016k --seq-len 64                       | 16 × 64 tokens
0 | plan tiny --on cpu:8 --batch 16 --mesh 'dp = 8'                        | asked for
0 | plan tiny --on cpu:8 --batch 16 --memory-headroom 10%                  | tiny · train
0 | plan tiny --on cpu:8 --batch 16 -o named                               | meshwright verify named
0 | plan tiny --on cpu:8 --batch 16 -o capital.JSON                        | meshwright verify capital.JSON
0 | plan --on cpu:8 --batch 16 tiny --compare dp=8 fsdp=8                  | loses because
0 | plan tiny-gpt2 --on cpu:8 --serve decode --prompt-len 200 --output-len 56 | tok/s
0 | --help plan                                                            | usage: meshwright plan
0 | help show pipeline                                                     | usage: meshwright show pipeline
2 | help plan train                                                        | no command 'plan train'
2 | --help nothing                                                         | no command 'nothing'
2 | --version --json                                                       | takes nothing behind it
2 | version extra                                                          | takes nothing behind it
2 | plan tiny --on cpu:8 --batch 1,6                                       | whole number from 1
2 | plan tiny --on cpu:8 --batch 1,,6                                      | whole number from 1
2 | plan tiny --on cpu:8 --batch 0x10                                      | whole number from 1
2 | plan tiny --on cpu:8 --batch +16                                       | whole number from 1
2 | plan tiny --on cpu:8 --batch 1_6                                       | whole number from 1
2 | plan tiny --on cpu:8 --batch １６                                      | whole number from 1
2 | plan tiny --on cpu:8 --batch ²                                         | whole number from 1
2 | plan tiny --on cpu:8 --batch 16. --seq-len 64                          | whole number from 1
2 | plan tiny --on cpu:8 --batch '16 k'                                    | whole number from 1
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=８                           | degree
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=+8                           | degree
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=0_8                          | degree
2 | plan tiny --on cpu:8 --batch 16 --mesh dp=8=8                          | degree
2 | plan tiny --on cpu:8 --batch 16 --mesh dp:8                            | entries
2 | plan tiny --on cpu:８ --batch 16                                       | a chip and a shape or count
2 | plan tiny --on v5e:２x2 --batch 16                                     | a chip and a shape or count
2 | plan tiny --on v5e:4x --batch 16                                       | a chip and a shape or count
2 | plan tiny --on v5e:4*4 --batch 16                                      | a chip and a shape or count
2 | plan tiny --on h100:8x1 --batch 16                                     | number of devices
2 | plan tiny --on cpu:8 --batch 16 --memory-headroom ०.१                  | share
2 | plan tiny --on cpu:8 --batch 16 --memory-headroom 10%%                 | share
2 | plan tiny --on cpu:8 --batch 16 --memory-headroom 1                    | share
2 | plan tiny --on cpu:8 --batch 16 --tokens 1T --price 1e300              | amount
2 | plan tiny --on cpu:8 --batch 16 --tokens 1T --price 4,2                | amount
2 | plan tiny --on cpu:8 --batch 16 --price 4.2                            | --price has no effect
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=8,8                      | twice
2 | plan tiny --on cpu:8 --batch 16 --ici_fsdp_parallelism 4               | here that is a degree of --mesh: fsdp
2 | plan tiny --on cpu:8 --batch 16 --tensor-model-parallel-size 4         | here that is a degree of --mesh: tp
2 | plan tiny --on cpu:8 --batch 16 --mesh dcn_data=2,ici_fsdp=4           | here that is dp of a system of several slices
2 | plan tiny --on cpu:8 --batch 16 --sweep chips=４,8                     | whole number
2 | plan tiny --on cpu:8 --batch 16 --plot a.svg -o a.svg                  | .yaml
2 | plan tiny --on cpu:8 --batch 16 -o a.toml                              | .yaml
2 | plan tiny --on cpu:8 --batch 16 -o -                                   | /dev/stdout
2 | plan tiny --on cpu:8 --batch 16 -o /dev/fd/77                          | /dev/fd/77
2 | plan tiny --on cpu:8 --batch 16 -o good/config.json/x                  | is not a directory
2 | plan plan.json --on cpu:8 --batch 16                                   | plan.json
2 | plan run --on cpu:8 --batch 16                                         | is not the config of a run
2 | plan tiny --on cpu:8 --batch 16 --verbose                              | no option --verbose; --help
2 | plan tiny --on cpu:8 --batch 16 --json false                           | no place for 'false'
2 | plan tiny --on cpu:8 --serve decode --latency ３0ms                    | not a time
2 | plan tiny --on cpu:8 --serve decode --latency 3e1ms                    | not a time
2 | plan tiny --on cpu:8 --serve decode -o s.txt                           | .yaml
2 | plan tiny-gpt2 --on cpu:8 --serve decode                               | 256 positions
2 | plan tinny                                                             | did you mean tiny
"""
