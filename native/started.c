#include "started.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ANCESTORS 256

static bool has(const struct pids *pids, int pid) {
    for (uint32_t i = 0; i < pids->count; i++)
        if (pids->list[i] == pid)
            return true;
    return false;
}

static void add(int pid, void *context) {
    struct pids *pids = context;
    if ((pids->count & (pids->count - 1)) == 0) {
        int *grown = realloc(pids->list, (pids->count ? 2 * pids->count : 1) * sizeof *grown);
        if (!grown)
            return;
        pids->list = grown;
    }
    pids->list[pids->count++] = pid;
}

static int parent_of(int pid, bool *forked) {
    char path[32], text[512];
    bool ignored;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return parent_parse(text, forked ? forked : &ignored);
}

/* What background processes of earlier commands start belongs to those. */
static bool is_started(const struct started *started, int pid, bool *forked) {
    int shell = started->session->pid;
    if (pid == shell)
        return false;
    for (int i = 0; i < ANCESTORS && pid > 1 && pid != shell; i++) {
        if (has(&started->before, pid))
            return false;
        pid = parent_of(pid, i ? NULL : forked);
    }
    return true;
}

struct search {
    struct started *started;
    int signal; /* 0: only counts */
    uint32_t found;
};

/* SIGINT once each: a second one would disturb a program that is cleaning up. A shell's child may lose it to the shell's own
 * handler before its exec, and does not count as told. */
static void visit(int pid, void *context) {
    struct search *search = context;
    struct started *started = search->started;
    bool forked = false;
    if (!is_started(started, pid, &forked))
        return;
    search->found++;
    if (!search->signal || (search->signal == SIGINT && has(&started->told, pid)))
        return;
    kill(pid, search->signal);
    if (search->signal == SIGINT && !forked)
        add(pid, &started->told);
}

void started_begin(struct started *started, struct session *session) {
    *started = (struct started){.session = session};
    if (session->group)
        group_pids(session->group, add, &started->before);
}

uint32_t started_signal(struct started *started, int number) {
    struct session *s = started->session;
    struct search search = {started, number, 0};
    if (s->group)
        group_pids(s->group, visit, &search);
    else if (number && !s->reaped)
        kill(-s->pid, number);
    return search.found;
}

void started_release(struct started *started) {
    free(started->before.list);
    free(started->told.list);
}
