"""Training jobs that are broken on purpose, and clean ones beside them: what a verdict has to tell apart.

declarations  what a job is; table.py has them all
faults        the small patches that break a job, in its own process
train         the one script that carries a job out
effect        how far a fault moves the job's numbers, beside the same job unbroken
traces        what of its recording could betray it
campaign      records each job, replays it as a user would, and says what the verdict was
"""
