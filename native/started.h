/* The processes that one command of a shell session started, told from the shell and from those of earlier commands. */
#ifndef BARCHAN_STARTED_H
#define BARCHAN_STARTED_H
#include "sessions.h"

struct pids {
    int *list;
    uint32_t count;
};

struct started {
    struct session *session;
    struct pids before, told; /* the processes that there were before; those that got SIGINT */
};

/* Before the shell knows of the command. */
void started_begin(struct started *started, struct session *session);
/* Sends the signal, unless 0; how many there are. Without a control group the whole process group is all there is, and it
 * counts as none. */
uint32_t started_signal(struct started *started, int number);
void started_release(struct started *started);
#endif
