/* Whom the kernel ends first when memory runs out: programs, before the guest that serves them all. */
#ifndef BARCHAN_OOM_H
#define BARCHAN_OOM_H

/* Takes the score meant for programs from OOM_SCORE_ADJ; without it, or when the guest has that score itself, scores stay alone. */
void oom_init(void);
/* Raises a program that just started; what it had set higher itself stays. */
void oom_expose(int pid);
#endif
