#include "spawner_arguments.h"

#include <stdlib.h>
#include <string.h>

static int number(const char *text, long *value) {
    char *end;
    *value = strtol(text, &end, 10);
    return *text && !*end && *value >= 0 && *value < UINT32_MAX ? 0 : -1;
}

static int read_place(struct spawner_arguments *given, const char *name, long value) {
    struct place_directories *places = &given->places;
    if (!strcmp(name, "--v1"))
        return places->v1_count == SPAWN_MAX_GROUPS ? -1 : (places->v1[places->v1_count++] = (int)value, 0);
    const struct {
        const char *name;
        int *fd;
        uint32_t *number;
    } known[] = {{"--ids", &places->ids, NULL},
                 {"--unified", &places->unified, NULL}, {"--trees", &places->trees.trees, NULL},
                 {"--uid-first", NULL, &places->uid_first}, {"--uid-size", NULL, &places->uid_size},
                 {"--slots", NULL, &places->slots}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) {
            if (known[i].fd)
                *known[i].fd = (int)value;
            else
                *known[i].number = (uint32_t)value;
            return 0;
        }
    return -1;
}

static int read_argument(struct spawner_arguments *given, const char *name, const char *text) {
    long value;
    if (!strcmp(name, "--instance")) {
        given->places.instance = text;
        return strlen(text) < SPAWN_NAME ? 0 : -1;
    }
    if (number(text, &value))
        return -1;
    if (!strcmp(name, "--socket"))
        given->control = (int)value;
    else if (!strcmp(name, "--guest"))
        given->guest = (int)value;
    else if (!strcmp(name, "--guest-uid"))
        given->guest_uid = (uint32_t)value;
    else
        return read_place(given, name, value);
    return 0;
}

static int places_complete(const struct place_directories *places) {
    if (places->trees.trees < 0)
        return 1;
    return places->ids >= 0 && places->unified >= 0 && places->instance &&
           places->uid_first && places->uid_size > 1 && places->slots;
}

int read_arguments(int count, char **arguments, struct spawner_arguments *given) {
    struct place_directories *places = &given->places;
    *given = (struct spawner_arguments){.control = -1, .guest = -1};
    places->ids = places->unified = places->trees.trees = -1;
    for (int i = 1; i + 1 < count; i += 2)
        if (read_argument(given, arguments[i], arguments[i + 1]))
            return -1;
    return count % 2 == 1 && given->control >= 0 && given->guest >= 0 && given->guest_uid && places_complete(places) ? 0 : -1;
}
