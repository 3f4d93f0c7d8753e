"""The command line of lm-evaluation-harness with magicjax models: python -m experiments.lm_eval"""

from experiments.lm_eval.adapter import main

if __name__ == "__main__":
    main()
