"""What a new user types at matmul, collective, show, chips, verify and completion; see `battery_plan`."""

CALLS = """
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2                  | together
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8k,J=8Ki,K=8 --on v5e:2x2               | together
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v4-8                     | TensorCores
0 | matmul 'A[I, J_X] @ B[J_X, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2                | case 3
0 | matmul 'A[I_X, J] -> A[I, J]' --mesh X=4 --dims I=8,J=8 --on v5e:2x2                     | resharding
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --json           | alternatives
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --dtype int8     | int8
2 | matmul                                                                                   | PRODUCT is missing
2 | matmul plan.yaml                                                                         | `meshwright plan plan.yaml --ops` prints its matmuls
0 | matmul 'A[I_X, J] @ B[J, K]'                                                             | I=8,192, J=8,192, K=8,192: the size of a dim that is left out
0 | matmul 'A[I_X, J_Y] @ B[J_Y, K]' --on v5e:2x4                                            | X=4, Y=2: all devices
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8                               | on is left out: cpu:4
2 | matmul '' --mesh X=4 --dims I=8 --on v5e:2x2                                             | PRODUCT is empty
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8,Q=7 --on v5e:2x2              | Q
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8 --on v5e:2x2                      | K
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=0 --on v5e:2x2                  | whole number from 1
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=x --on v5e:2x2                  | whole number
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=3 --dims I=8,J=8,K=8 --on v5e:2x2                  | X
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh Y=4 --dims I=8,J=8,K=8 --on v5e:2x2                  | no axis X
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4,X=2 --dims I=8,J=8,K=8 --on v5e:2x2              | is given twice
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=8 --dims I=8,J=8,K=8 --on v5e:2x2                  | 8
2 | matmul 'A[I_X, J @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2                   | expected
2 | matmul 'A[I_X, J_X] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2                | X
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --dtype f12      | not known
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --top 0          | whole number from 1
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --top -1         | whole number from 1
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --json --top 2   | --top has no effect
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --batch 8        | no option --batch
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=128 --dims I=128,J=8,K=8 --on v5e:8x16 --run       | --run simulates up to 64
0 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64M                       | 64.0 MB
0 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64Mi                      | 67.1 MB
0 | collective reduce-scatter --mesh X=4,Y=4 --axis X,Y --on v5e:4x4 --bytes 64M             | links
0 | collective all-reduce --mesh X=8 --axis X --on h100:8 --bytes 1G                         | node
0 | collective permute --mesh X=4 --axis X --on v5e:4x4 --bytes 1k --json                    | seconds
2 | collective                                                                               | KIND is missing
2 | collective gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64M                           | did you mean all-gather
2 | collective all-gather --mesh X=4 --axis Y --on v5e:4x4 --bytes 64M                       | Y
2 | collective all-gather --mesh X=4 --axis X,X --on v5e:4x4 --bytes 64M                     | twice
2 | collective all-gather --mesh X=4 --axis '' --on v5e:4x4 --bytes 64M                      | --axis needs a value
2 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 0                         | --bytes
2 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes -1                        | --bytes
2 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64X                       | --bytes
2 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes nan                       | --bytes
0 | collective all-reduce --on v5e:2x4                                                       | all-reduce over X = 8
0 | collective all-gather --mesh X=4 --axis X --on v5e:4x4                                   | 64.0 MB, the gathered array
2 | collective all-gather --mesh X=32 --axis X --on v5e:4x4 --bytes 64M                      | 16
2 | collective all-gather --mesh X=0 --axis X --on v5e:4x4 --bytes 64M                       | whole number from 1
2 | collective all-gather --mesh X=4 --axis X --on v5e:4x4 --bytes 64M --json --run          | --run has no effect with --json
2 | collective all-gather --mesh X=16 --axis X --on v5e:4x4 --bytes 64M --run                | up to 8 devices
0 | show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8,J=8                                         | device
0 | show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8,J=8 --all                                   | next
0 | show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8k,J=8 --json                                 | holds
0 | show "P('X','Y')" --mesh X=2,Y=2 --dims I=8,J=8                                          | A[I_X, J_Y]
0 | show "P(('X','Y'))" --mesh X=2,Y=2 --dims I=8,J=8                                        | A[I_XY, J]
2 | show "P('X',None,'Y')" --mesh X=2,Y=2 --dims I=8,J=8                                     | has 3 entries
2 | show "P(3)" --mesh X=2,Y=2 --dims I=8,J=8                                                | an axis in quotes
2 | show "P(X)" --mesh X=2,Y=2 --dims I=8,J=8                                                | an axis in quotes
0 | show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8,J=8 -o a.svg                                | wrote
2 | show                                                                                     | ARRAY|PLAN|RUN is missing
0 | show plan.yaml                                                                           | meshwright verify plan.yaml
0 | show plan.yaml --json                                                                    | bytes_per_device
2 | show plan.yaml --mesh X=2                                                                | --mesh has no effect with plan.yaml
2 | show serve.yaml                                                                          | is a plan to serve
2 | show run                                                                                 | run/config.json is not the config of a run
2 | show none                                                                                | --mesh is missing: 'none' is neither a plan's file
2 | show 'A[I_X]' --mesh X=2                                                                 | --dims is missing
0 | show 'A[I_fsdp]' --mesh plan.yaml --dims I=8                                             | device
0 | matmul 'A[I_fsdp, J] @ B[J, K]' --mesh plan.yaml --dims I=8,J=8,K=8 --on cpu:8           | --mesh plan.yaml --dims I=8,J=8,K=8 --on cpu:8 --run
0 | collective all-gather --mesh plan.yaml --axis fsdp --on cpu:8 --bytes 1M                 | --bytes 1M --run
0 | collective all-gather --mesh X=16 --axis X --on v5e:4x4 --bytes 64M                      | meshwright chips v5e
0 | matmul 'A[I, J_X] @ B[J_X, K]' --mesh X=100 --dims I=800,J=800,K=800 --on h100:100       | meshwright collective all-reduce --mesh X=100
0 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=100 --dims I=800,J=8,K=8 --on h100:100             | meshwright show 'C[I_X, K]' --mesh X=100
2 | inspect plan.yaml --mesh dp=8                                                            | --mesh has no effect with plan.yaml
2 | inspect run                                                                              | run/config.json is not the config of a run
2 | inspect os:getcwd                                                                        | --mesh is missing
2 | show 'A[I_X, J_Y]' --mesh X=2 --dims I=8,J=8                                             | Y
2 | show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8                                             | J
2 | show 'A[I_X, J_Y]' --mesh X=2,Y=2 --dims I=8,J=8,Q=7                                     | Q
2 | show 'A[I_X, J_Y]' --mesh X=3,Y=2 --dims I=8,J=8                                         | 3
2 | show 'A[I_X, J_X]' --mesh X=2 --dims I=8,J=8                                             | X
2 | show 'A[I_X' --mesh X=2 --dims I=8                                                       | expected
2 | show 'A[I_X]' --mesh X=2 --dims I=8 --svg a.png                                          | .svg
2 | show 'A[I_X]' --mesh X=2 --dims I=8 --svg none/a.svg                                     | none
2 | show 'A[I_X]' --mesh X=2 --dims I=8 --svg dir                                            | dir
2 | show 'A[I_X]' --mesh X=2 --dims I=8 --on v5e                                             | a chip and a shape or count
2 | show 'A[I_X]' --mesh X=2 --dims I=8 --dtype f12                                          | not known
0 | show pipeline --stages 4 --microbatches 8                                                | the bubble is the other 27.3%
0 | show pipeline --stages 4 --microbatches 8 -o a.html                                      | wrote
0 | matmul cases --on v5e:2x2 -o a.svg                                                       | wrote
2 | matmul cases --on v5e:2x2 --run                                                          | --run has no effect with the four cases
2 | matmul 'A[I, J_X] @ B[J_X, K]' --on v5e:2x2 --device 4                                   | whose devices are 0 to 3
2 | collective all-gather --mesh X=16 --on h100:16 -o a.svg                                  | up to 8 devices
0 | devices                                                                                  | on='cpu:8'
0 | devices --json                                                                           | coordinates
0 | show pipeline --stages 2 --microbatches 4 --json                                         | bubble
2 | show pipeline                                                                            | --stages is missing
2 | show pipeline --stages 4                                                                 | --microbatches is missing
2 | show pipeline --stages 0 --microbatches 8                                                | 0 stages
2 | show pipeline --stages -4 --microbatches 8                                               | stages
2 | show pipeline --stages 4.5 --microbatches 8                                              | whole number
2 | show pipeline --stages 4 --microbatches 0                                                | microbatches
2 | show pipeline --stages 1000 --microbatches 100000                                        | too many
2 | show pipeline --stages 4 --microbatches 8 --schedule zb                                  | it is one of
2 | show pipeline --stages 4 --microbatches 8 --svg a.png                                    | .svg
2 | show pipeline --stages 4 --microbatches 8 extra                                          | no place for 'extra'
0 | chips                                                                                    | v5p
0 | chips H100                                                                               | source:
0 | chips tpu_v5p                                                                            | torus
0 | chips --json                                                                             | chips
0 | chips --hardware mine.toml                                                               | mine
2 | chips v5x                                                                                | did you mean v5p, v5e or tpu7x? `meshwright chips`
2 | chips v2-8                                                                               | did you mean v3, v4 or v5p?
2 | chips h1000                                                                              | did you mean h100, a100-80gb or h200?
2 | chips zzz                                                                                | is not known; `meshwright chips`
2 | chips --hardware shadow.toml                                                             | name yours otherwise
0 | help models                                                                              | llama3-8b
2 | train serve.yaml                                                                         | `meshwright serve MODEL --plan serve.yaml`
2 | chips v5e v5p                                                                            | no place for 'v5p'
2 | chips v5e --hardware mine.toml                                                           | chip of its own
2 | chips --hardware none.toml                                                               | cannot read
2 | chips --hardware bad.toml                                                                | bad.toml
2 | chips --top 3                                                                            | no option --top
2 | verify                                                                                   | MODEL is missing
2 | verify none.yaml                                                                         | no plan 'none.yaml'
2 | verify tiny                                                                              | --on
2 | verify tiny --on cpu:8 --batch 16 --tolerance nan                                        | --tolerance
2 | verify tiny --on cpu:8 --batch 16 --tolerance inf                                        | --tolerance
2 | verify tiny --on cpu:8 --batch 16 --tolerance -1                                         | --tolerance
2 | verify tiny --on cpu:8 --batch 16 --tolerance x                                          | --tolerance
2 | verify tiny --on cpu:8 --batch 16 --effort default                                       | --effort has no effect on cpu:8
2 | verify tiny --on cpu:8 --batch 16 --effort slow                                          | it is one of
2 | verify tiny --on cpu:8 --batch 16 --mesh dp=3                                            | needs 3 devices
2 | verify tiny --on cpu:8 --batch 16 --mesh pp=8                                            | pp=8
2 | verify tiny --on cpu:8 --batch 16 --mesh dp=8 --zero-stage 1                             | would have no effect
2 | verify tiny --on cpu:8 --batch 16 --mesh dp=8 --dropout 2                                | dropout
2 | verify tiny --on cpu:8 --batch 16 --mesh dp=8 --dropout nan                              | --dropout
2 | verify tiny --on cpu:8 --batch 16 --html none/x.html                                     | none
2 | verify tiny --on cpu:8 --batch 16 --run none                                             | no run in 'none'
2 | verify tiny --serve decode                                                               | --on
2 | verify tiny --serve train --on cpu:8                                                     | it is one of
2 | verify tiny --serve prefill --on cpu:8 --prompt-len 63 --batch 8 --mesh fsdp=2,tp=2,dp=2  | use a multiple of 2
2 | verify tiny --serve decode --on cpu:8 --seq-len 64                                       | use --prompt-len
2 | verify tiny --serve decode --on cpu:8 --remat none                                       | --remat is an option of
2 | verify tiny --serve decode --on cpu:8 --run run                                          | --run is an option of
2 | verify tiny --serve decode --on cpu:8 --html x.html                                      | --html is an option of
2 | verify tiny --serve decode --on cpu:8 --mesh tp=3                                        | needs 3 devices
2 | verify tiny --serve decode --on cpu:8 --mesh dp=8 --cache batch                          | splits nothing
2 | verify tiny --serve decode --on cpu:8 --cache rows                                       | it is one of
2 | verify tiny --serve decode --on cpu:8 --batch 0                                          | whole number from 1
2 | verify tiny --serve decode --on cpu:8 --prompt-len x                                     | prompt_len
2 | verify tiny --serve decode --on cpu:8 --chunk 16                                         | decode reads none
2 | verify tiny --serve prefill --on cpu:8 --prompt-len 64 --chunk 65                        | use at most these
2 | verify tiny --serve prefill --on cpu:8 --chunk 0                                         | whole number from 1
2 | verify tiny --serve decode --on cpu:8 --mesh fsdp=4,tp=2 --cache batch --batch 6         | a multiple of 4
2 | verify tiny --serve decode --on cpu:8 --latency soon                                     | soon
2 | verify tiny --serve decode --on cpu:8 --effort default                                   | --effort has no effect on cpu:8
2 | verify tiny --serve decode --on cpu:8 --tolerance -1                                     | --tolerance
2 | verify tiny --serve decode --on v5e:2x2 --kv-dtype fp4                                   | kv_dtype is fp4
2 | verify tiny --serve decode --on a100-80gb:2 --kv-dtype fp8                               | kv_dtype is fp8, and a100-80gb has no fp8; use int8
2 | verify tiny --serve decode --on a100-80gb:2 --weight-dtype fp8                           | weight_dtype is fp8, and a100-80gb has no fp8; use int8
2 | verify tiny --serve prefill --on v5e:2x2 --kv-dtype int8                                 | kv_dtype is int8
2 | verify tiny --serve prefill --on v5e:2x2 --weight-dtype f16                              | weight_dtype is f16
2 | verify tiny --on cpu:8 --batch 8 --cache batch                                           | --cache is an option of
2 | verify tiny --on cpu:8 --batch 8 --for training                                          | --serve
2 | verify plan.yaml --batch 16                                                              | batch
2 | verify plan.yaml --remat none                                                            | remat
2 | verify plan.yaml --hardware mine.toml                                                    | hardware
2 | verify plan.yaml --mesh dp=8                                                             | mesh
2 | verify plan.yaml --on cpu:4                                                              | on
2 | verify plan.yaml --run run                                                               | run
2 | verify cut.yaml                                                                          | cut.yaml
2 | verify empty                                                                             | empty
2 | verify bytes.yaml                                                                        | bytes.yaml
2 | verify list.yaml                                                                         | list.yaml
2 | verify run                                                                               | run
2 | verify dir                                                                               | dir
2 | verify tiny --on v5e:2x2 --batch 16 --mesh fsdp=4 --collective-matmul                    | would have no effect
0 | completion bash --print                                                                  | complete
0 | completion fish --print                                                                  | complete
0 | completion zsh                                                                           | wrote
2 | completion                                                                               | SHELL is missing
2 | completion csh                                                                           | it is one of
2 | inspect                                                                                  | is missing
2 | inspect :f --mesh dp=8                                                                   | is not module:function
2 | inspect f: --mesh dp=8                                                                   | is not module:function
2 | inspect os:getcwd --mesh dp=1000000                                                      | too many to simulate
2 | inspect steps.ipynb                                                                      | %load_ext meshwright
2 | inspect nowhere:f --mesh dp=8                                                            | nowhere
2 | inspect list.json --mesh dp=8                                                            | not HLO text
2 | inspect list.json --mesh dp=8 --axes auto                                                | --axes has no effect
2 | inspect os:getcwd --mesh dp                                                              | dp
2 | train                                                                                    | MODEL is missing
2 | train tiny                                                                               | --on
2 | train tiny --on cpu:8 --batch 16 --mesh dp=3                                             | needs 3 devices
2 | generate                                                                                 | DIR|RUN is missing
2 | generate nowhere                                                                         | nowhere
2 | export                                                                                   | RUN|DIR is missing
2 | export run                                                                               | DIR is missing
2 | export good out                                                                          | holds no weights
2 | export good dir                                                                          | holds no weights
2 | export good run                                                                          | run is not empty
2 | export run out                                                                           | no model_type
2 | export none out                                                                          | no directory 'none'
2 | export good empty                                                                        | empty is not a directory
2 | export good out --dtype int8                                                             | it is one of
2 | export good out --max-file-size 0                                                        | --max-file-size is 0
2 | export good out --max-file-size 5XB                                                      | is not a number of bytes; write it as 4096, 64M, 64MB
2 | export good out --on v9:1                                                                | chip 'v9'
2 | export good out more                                                                     | no place for 'more'
2 | eval                                                                                     | DIR|RUN is missing
2 | eval good                                                                                | one of --data (texts) and --task
2 | eval good --data plan.yaml --task list.json                                              | one of --data (texts) and --task
2 | eval good --data plan.yaml                                                               | needs hardware: --on
2 | eval good --data plan.yaml --on cpu:8                                                    | holds no weights
2 | eval run --data plan.yaml                                                                | no model_type
2 | eval none --data plan.yaml                                                               | no directory 'none'
2 | eval run --task none.jsonl                                                               | no model_type
2 | eval run --data plan.yaml --stride x                                                     | whole number
2 | eval good --data --on cpu:8                                                              | --data needs a value
2 | bench-serve                                                                              | URL is missing
2 | bench-serve 127.0.0.1:8000                                                               | write it as http://127.0.0.1:8000
2 | bench-serve http://127.0.0.1:9                                                           | no server answers at http://127.0.0.1:9
2 | bench-serve http://127.0.0.1:99999                                                       | with a port of 1 to 65535
2 | bench-serve http:///v1                                                                   | write it as http://127.0.0.1:8000
2 | bench-serve http://127.0.0.1:9 --rate 1 --concurrency 2                                  | leave one out
2 | bench-serve http://127.0.0.1:9 --rate 0                                                  | above 0
2 | bench-serve http://127.0.0.1:9 --rate 1,                                                 | is not a number
2 | bench-serve http://127.0.0.1:9 --concurrency 0                                           | whole number from 1
2 | bench-serve http://127.0.0.1:9 --num-requests x                                          | whole number
2 | bench-serve http://127.0.0.1:9 --slo speed=1                                             | as ttft=0.5,tpot=0.05
2 | bench-serve http://127.0.0.1:9 --timeout 0                                               | number of seconds above 0
2 | bench-serve http://127.0.0.1:9 --prompts none                                            | cannot read none
2 | bench-serve http://127.0.0.1:9 --prompts plan.yaml                                       | line 1 is not JSON
2 | bench-serve http://127.0.0.1:9 --prompt-len 2048                                         | --max-len is 2,048
2 | bench-serve http://127.0.0.1:9 --plan plan.yaml                                          | is not a serving plan
2 | bench-serve http://127.0.0.1:9 --plot load.gif                                           | .png, .svg, .pdf
2 | demo extra                                                                               | no place for 'extra'
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=４ --dims I=8,J=8,K=8 --on v5e:2x2                  | not a character of the notation
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4.0 --dims I=8,J=8,K=8 --on v5e:2x2                | the end expected
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4, --dims I=8,J=8,K=8 --on v5e:2x2                 | a name
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8,I=16 --on v5e:2x2             | I is given twice
2 | matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims i=8,j=8,k=8 --on v5e:2x2                  | has no size
2 | matmul 'A[I_X, I] @ B[I, K]' --mesh X=4 --dims I=8,K=8 --on v5e:2x2                      | dim I twice
2 | matmul 'A[I_X, J] @ B[J, K] -> C[I, Q]' --mesh X=4 --dims I=8,J=8,K=8,Q=8 --on v5e:2x2   | dim Q
2 | matmul 'Α[Ι_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2                  | not a character of the notation
2 | collective all-gather --mesh X=4 --axis X --on v5e:2x2 --bytes 1e6                       | --bytes
2 | collective all-gather --mesh X=4 --axis X --on v5e:2x2 --bytes 64XB                      | --bytes
2 | collective all-gather --mesh X=4 --axis X --on v5e:2x2 --bytes +64M                      | --bytes
2 | collective all-gather --mesh X=4 --axis X, --on v5e:2x2 --bytes 64M                      | axis ''
2 | collective all_gather --mesh X=4 --axis X --on v5e:2x2 --bytes 64M                       | did you mean all-gather
2 | show pipelines --stages 4 --microbatches 8                                               | an option of show pipeline
2 | show pipeline --stages 4 --microbatches 8 --dims I=8                                     | an option of show
2 | show pipeline --stages ４ --microbatches 8                                               | whole number
2 | show pipeline --stages 4 --microbatches 7 --virtual-stages 2                             | multiple of 4
2 | show 'A[I_X]' --mesh X=100000 --dims I=100000                                            | too large to draw
2 | show 'A[I_X] @ B[I]' --mesh X=4 --dims I=8                                               | the end expected
2 | chips v5e:2x2                                                                            | did you mean v5e
2 | completion BASH                                                                          | it is one of
2 | verify plan.yaml --seq-len 64                                                            | --seq-len (seq_len=…)
2 | inspect os:getcwd --mesh dp=２                                                           | not a list of axes
2 | inspect os:getcwd --mesh dp=-1                                                           | not a list of axes
2 | inspect os.getcwd --mesh dp=2                                                            | neither a file nor module:function
2 | inspect dir --mesh dp=2                                                                  | neither a file nor module:function
2 | train tiny --on cpu:2 --batch 4 --learning-rate ०.१                                      | takes a number
2 | train tiny --on cpu:2 --batch 4 --learning-rate 0,001                                    | takes a number
2 | train tiny --on cpu:2 --batch 4 --seed 0x10                                              | whole number
2 | train tiny --on cpu:2 --batch 4 --seq-len 32 --remat alternate                           | does not run
2 | train tiny --on cpu:2 --batch 4 --eval-tasks none.jsonl                                  | eval_tasks has no effect without eval_every
2 | train tiny --on cpu:2 --batch 4 --objective dpo --data p.jsonl --fields prompt,chosen    | fields is not for objective='dpo'
2 | train tiny --on cpu:2 --batch 4 --fields text                                            | no source has records that it is for
2 | train tiny --on cpu:2 --batch 4 --fields text [q],a                                      | two templates for all sources
2 | train tiny --on cpu:2 --batch 4 --data plan.yaml --fields plan.yml=text                  | did you mean plan.yaml
2 | train tiny --on cpu:2 --batch 4 --data plan.yaml --fields plan.yaml=text                 | is text, which has no fields
2 | train tiny --on cpu:2 --batch 4 --data plan.yaml --fields plan.yaml=[text]               | every part is in brackets
2 | train tiny --on cpu:2 --batch 4 --objective dpo --data p.jsonl --rows padded             | rows is not for objective='dpo'
2 | train tiny --on cpu:2 --batch 4 --objective dpo --data p.jsonl --fields p.jsonl=a         | fields is not for objective='dpo'
2 | train tiny --on cpu:2 --batch 4 --objective dpo --data p.jsonl --rows packed             | each answer of a pair is a padded row
2 | train tiny --on cpu:2 --batch 4 --beta 0.1                                               | beta is for objective='dpo'
2 | train run                                                                                | model_type
2 | train run --resume                                                                       | workload is missing
2 | generate run                                                                             | no model_type
2 | generate run x --prompt -x                                                               | --prompt=-x
2 | generate dir                                                                             | neither a run nor a Hugging Face
2 | generate good                                                                            | needs hardware: --on
2 | generate good --on cpu:8                                                                 | holds no weights
2 | generate good --on cpu:8 --weight-dtype int3                                             | it is one of int8, int4, fp8
2 | generate good --on cpu:8 --mesh pp=8                                                     | use pp=1
2 | generate good --on cpu:8 --mesh dp=3                                                     | needs 3 devices
2 | generate good --on cpu:8 --prompts none.jsonl                                            | cannot read none.jsonl
2 | generate good --on cpu:8 --prompts empty                                                 | has no prompt
2 | generate good --on cpu:8 a b --prompts empty                                             | both give prompts
2 | generate good --on cpu:8 --data x.jsonl                                                  | needs a file for the answers: -o
2 | generate good --on cpu:8 a --data x.jsonl -o a.jsonl                                     | both give prompts
2 | generate run --top-p 2                                                                   | top_p is 2.0
2 | generate run --min-p -1                                                                  | min_p is -1.0
2 | generate run --top-k 1.5                                                                 | whole number
2 | generate run --repetition-penalty 0                                                      | above 0, where 1 is none
2 | generate run --stop                                                                      | --stop needs a value
2 | generate good --on cpu:8 --stop '' a                                                     | --stop has an empty text
2 | generate run --stop-tokens x                                                             | whole number
2 | generate run --num-samples 0                                                             | --num-samples is 0
2 | generate run --temperature 0 --num-samples 2                                             | are all one text
2 | generate run --num-tokens 1e3                                                            | whole number
2 | serve                                                                                    | DIR|RUN is missing
2 | serve nowhere                                                                            | no directory 'nowhere'
2 | serve run --port 70000                                                                   | --port is 70000
2 | serve run --kv-dtype fp4                                                                 | --kv-dtype is 'fp4'
2 | serve run --weight-dtype fp4                                                             | --weight-dtype is 'fp4'
2 | serve run --timeout 0                                                                    | --timeout is 0.0
2 | serve run --batch 0                                                                      | batch is 0
2 | serve run --api-keys none                                                                | cannot read --api-keys none
2 | serve run --api-keys empty                                                               | has no key
2 | serve run --drafts 99                                                                    | num_drafts is 99
2 | serve run --plan none.yaml                                                               | no serving plan 'none.yaml'
2 | serve run --plan plan.yaml                                                               | but a plan to train
2 | serve run --plan plan.yaml --replicas 2                                                  | is of one server
"""
