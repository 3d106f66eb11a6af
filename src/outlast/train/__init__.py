"""The reference trainer: any causal language model on torch-native parallelism.

    from outlast.job import load_job
    from outlast.distributed.ranks import ALONE
    from outlast.train.run import Start, work
    code = work(Start(load_job()), ALONE)        # 0 done, 3 stopped and to be continued

`outlast.train.build` is the one place where a run is put together. The loss curve is a function of
the job alone: not of the number of processes, nor of where the run was stopped and resumed.
"""
